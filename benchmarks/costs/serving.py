"""The service on the loopback of one machine: queries per second in batches, and 100 parallel clients.

The ratio compares CPU seconds of the process of the service, because other work on the machine changes times.

python -m benchmarks.costs.serving [--small] [--out FILE]
"""

import multiprocessing
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import requests
import tritonclient.http as triton

from benchmarks import record
from benchmarks.monitor.run import calibrated
from benchmarks.runs import parser_of
from geoq.serving.app import server_of

N_BATCH, N_CLIENTS, WIDTH = 1000, 100, 0.9


def repeated(seconds, work):
    """How often work was done in some seconds, and how often per second."""
    n, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        work()
        n += 1
    return n, n / (time.perf_counter() - started)


def asked_in_batches(port, binary, seconds, found):
    """A client process that sends batches one after the other."""
    x = np.random.default_rng(0).uniform(-WIDTH, WIDTH, size=(N_BATCH, 3))
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("x", [*x.shape], "FP64")
    tensor.set_data_from_numpy(x, binary_data=binary)
    names = "prediction", "error_hat", "safe", "support_score"
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    found.put(repeated(seconds, lambda: client.infer("geoq", [tensor], outputs=outputs)))


def asked_in_parallel(port, n_clients, seconds, found):
    """A process of parallel clients, each of which sends single queries; their times."""
    end = time.monotonic() + seconds

    def client(seed):
        rng, times = np.random.default_rng(seed), []
        with requests.Session() as session:
            while time.monotonic() < end:
                content = {"name": "bound", "input": rng.uniform(-WIDTH, WIDTH, (1, 3)).tolist()}
                started = time.perf_counter()
                answer = session.post(f"http://127.0.0.1:{port}/Evaluate", json=content, timeout=30)
                answer.json()["output"]
                times.append(time.perf_counter() - started)
        return times

    with ThreadPoolExecutor(n_clients) as pool:
        found.put(np.concatenate([*pool.map(client, range(n_clients))]))


def main(words=None):
    warnings.simplefilter("ignore")
    asked = parser_of(__doc__).parse_args(words)
    seconds, n_clients = (0.2, 4) if asked.small else (10, N_CLIENTS)
    estimator, _, queries = calibrated(0, 500, 3)
    x, rows = queries(N_BATCH, WIDTH), []
    server = server_of(estimator, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    spawn = multiprocessing.get_context("spawn")

    def measured(target, *settings):
        found = spawn.Queue()
        process = spawn.Process(target=target, args=(port, *settings, found))
        process.start()
        result = found.get(timeout=120)
        process.join()
        return result

    for form, binary in (("assess in process", None), ("binary tensors", True), ("JSON", False)):
        before = time.process_time()
        if binary is None:
            n, rate = repeated(seconds, lambda: estimator.assess(x))
        else:
            n, rate = measured(asked_in_batches, binary, seconds)
        busy = 1e3 * (time.process_time() - before) / n
        row = {"seed": 0, "n": N_BATCH, "form": form, "queries_per_second": N_BATCH * rate}
        rows.append(row | {"cpu_milliseconds": busy})
        rows[-1]["ratio"] = rows[0]["cpu_milliseconds"] / rows[-1]["cpu_milliseconds"]
    times = measured(asked_in_parallel, n_clients, seconds if asked.small else 60)
    spread = {f"p{p}": float(np.quantile(times, p / 100)) for p in (50, 99)}
    rate = len(times) / (seconds if asked.small else 60)
    about = {"seed": 0, "n": 1, "form": f"{n_clients} clients"}
    rows.append({**about, "queries_per_second": rate, **spread})
    server.should_exit = True
    thread.join()
    return record.write("serving", rows, asked.out, small=asked.small)


if __name__ == "__main__":
    main()
