"""The service with clients that are not a part of geoq; all traffic stays on this machine and is bounded in count and time."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import requests

from geoq import GeoQ, RandomFolds
from geoq.monitor import Monitor
from geoq.serving.app import server_of
from geoq.serving.page import HTML
from geoq.serving.served import Refusal, Served

umbridge = pytest.importorskip("umbridge")
triton = pytest.importorskip("tritonclient.http")
INFER = "/v2/models/geoq/infer"
BRAKE = 77.0  # the surrogate of these tests raises or sleeps at these inputs


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1]


def surrogate(x):
    x = np.asarray(x, dtype=float)
    if (x[:, 0] == BRAKE).any():
        raise RuntimeError("the mesh is tangled")
    if (x[:, 0] == 2 * BRAKE).any():
        time.sleep(0.8)
    return 3 * x[:, 0] - 4 * x[:, 0] ** 3 + x[:, 1]


def calibrated(as_x=np.asarray):
    x = np.random.default_rng(0).uniform(-1, 1, size=(120, 2))
    return GeoQ(surrogate, None, folds=RandomFolds(5)).fit(as_x(x), truth(x))


@contextmanager
def running(estimator, **settings):
    """The address of a service in another thread."""
    server = server_of(estimator, port=0, **settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def estimator():
    return calibrated()


@pytest.fixture(scope="module")
def url(estimator):
    with running(estimator, seconds=2, megabytes=0.5) as address:
        yield address


def infer(url, x, names=None, *, binary=True):
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    tensor = triton.InferInput("x", list(x.shape), "FP64")
    tensor.set_data_from_numpy(x, binary_data=binary)
    outputs = names and [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    return client.infer("geoq", [tensor], outputs=outputs)


def post(url, path, content, **settings):
    body = content if isinstance(content, bytes) else json.dumps(content)
    return requests.post(url + path, data=body, timeout=10, **settings)


def tensor(x, name="x"):
    return {"inputs": [{"name": name, "shape": [*x.shape], "datatype": "FP64", "data": x.tolist()}]}


def test_the_umbridge_client_receives_the_answers_of_assess(url, estimator):
    point = [0.3, -0.2]
    answer = estimator.assess(np.array([point]))
    prediction, bound = [answer.prediction[0]], [answer.error_hat[0]]
    score = [answer.support_score[0]]
    expected = {"prediction": [prediction], "bound": [bound], "support_score": [score]}
    expected["assess"] = [prediction, bound, [1.0], score]
    assert umbridge.supported_models(url) == [*expected]
    for name, output in expected.items():
        model = umbridge.HTTPModel(url, name)
        assert model.get_input_sizes() == [2]
        assert model.get_output_sizes() == [1] * len(output)
        assert model([point]) == output
        assert not model.supports_gradient()


def test_qmcpy_integrates_the_bound(url, estimator):
    qmcpy = pytest.importorskip("qmcpy")
    measure = qmcpy.Uniform(qmcpy.DigitalNetB2(2, seed=7), lower_bound=-1, upper_bound=1)
    integrand = qmcpy.UMBridgeWrapper(measure, umbridge.HTTPModel(url, "bound"))
    points = qmcpy.DigitalNetB2(2, seed=7).gen_samples(16)
    np.testing.assert_allclose(integrand.f(points), estimator.bound(2 * points - 1), rtol=1e-6)


@pytest.mark.parametrize("binary", [True, False])
def test_the_inference_client_receives_the_answers_of_assess(url, estimator, binary):
    x = np.random.default_rng(1).uniform(-1.5, 1.5, size=(50, 2))
    x[7] = np.nan if binary else x[7]
    answer = estimator.assess(x)
    found = infer(url, x, binary=binary)
    for name in ("prediction", "error_hat", "support_score", "safe"):
        values = found.as_numpy(name)
        assert values.dtype == (bool if name == "safe" else float)
        np.testing.assert_array_equal(values, getattr(answer, name))
    assert found.get_output("reason") is None
    texts = infer(url, x[:3], ["reason"], binary=binary).as_numpy("reason")
    found = [text if isinstance(text, str) else text.decode() for text in texts]
    assert found == [answer.reason(i) for i in range(3)]


def test_the_inference_client_finds_health_and_metadata(url):
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("geoq")
    described = client.get_model_metadata("geoq")
    assert described["inputs"] == [{"name": "x", "datatype": "FP64", "shape": [-1, 2]}]
    kinds = ["FP64", "FP64", "BOOL", "FP64", "BYTES"]
    assert [part["datatype"] for part in described["outputs"]] == kinds


def test_columns_of_a_data_frame_are_tensors_of_their_names():
    pandas = pytest.importorskip("pandas")

    def table(x):
        names = np.array(["cold", "warm"])[(x[:, 1] > 0).astype(int)]
        return pandas.DataFrame({"speed": x[:, 0], "kind": names})

    x = np.random.default_rng(0).uniform(-1, 1, size=(120, 2))
    model = GeoQ(lambda f: 2 * f["speed"].to_numpy(), None, folds=RandomFolds(5))
    model.fit(table(x), truth(x))
    columns = {"speed": ("FP64", [0.2, None]), "kind": ("BYTES", ["warm", "hot"])}
    inputs = [{"name": n, "datatype": t, "shape": [2], "data": d} for n, (t, d) in columns.items()]
    with running(model) as address:
        asked = {"inputs": inputs, "outputs": [{"name": "safe"}, {"name": "prediction"}]}
        found = post(address, INFER, asked).json()
        refused = post(address, "/Evaluate", {"name": "bound", "input": [[1, 2]]}).json()
    assert [part["data"] for part in found["outputs"]] == [[True, False], [0.4, None]]
    assert refused["error"]["type"] == "UnsupportedFeature"


def test_a_column_of_booleans_is_true_or_false_and_nothing_else():
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).uniform(-1, 1, size=(120, 2))
    table = pandas.DataFrame({"speed": x[:, 0], "wet": x[:, 1] > 0})
    model = GeoQ(lambda f: f["speed"].to_numpy() + f["wet"].to_numpy(), None, folds=RandomFolds(5))
    served = Served(model.fit(table, truth(x)))

    def wet(*values):
        columns = {"speed": np.zeros(len(values)), "wet": np.array(values, object)}
        return served.queries(columns)["wet"].tolist()

    assert wet("True", "true", True, "False", "false", False) == [True] * 3 + [False] * 3
    with pytest.raises(Refusal, match="pass true or false"):
        wet("yes")


BAD = {
    "not JSON": (b"{", "strict JSON"),
    "NaN": (b'{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP64", "data": [NaN, 1]}]}', "strict JSON"),
    "NaN as text": ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP64", "data": ["NaN", 1]}]}, "numbers alone"),
    "no object": ([1], "pass inputs"),
    "null": (b"null", "pass inputs"),
    "a name twice": ({"inputs": 2 * tensor(np.zeros((1, 2)))["inputs"]}, "the same name"),
    "no data": ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP64"}]}, "must be lists"),
    "ragged": ({"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP64", "data": [[1, 2], [3]]}]}, "'x' is not usable"),
    "too deep": (b"[" * 5000, "strict JSON"),
    "no inputs": ({"x": 1}, "pass inputs"),
    "another name": ({"inputs": [{"name": "z", "shape": [1], "datatype": "FP64", "data": [1]}]}, "pass the inputs"),
    "text": ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP64", "data": ["1", "2"]}]}, "numbers alone"),
    "flags": ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP64", "data": [True, True]}]}, "numbers alone"),
    "another size": ({"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP64", "data": [1, 2]}]}, "cannot reshape"),
    "three columns": (tensor(np.zeros((1, 3))), "but GeoQ was fitted on rows of shape"),
    "no rows": (tensor(np.zeros((0, 2))), "pass at least one query"),
    "another type": ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP65", "data": [1, 2]}]}, "FP65"),
    "output without a name": (tensor(np.zeros((1, 2))) | {"outputs": [{}]}, "there is no output None"),
    "unknown output": (tensor(np.zeros((1, 2))) | {"outputs": [{"name": "y"}]}, "there is no output 'y'"),
    "bytes that are not there": ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP64", "parameters": {"binary_data_size": 16}}]}, "0 bytes follow"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_in_the_schema_of_the_protocol(url, name):
    content, words = BAD[name]
    response = post(url, INFER, content)
    assert response.status_code == 400
    assert [*response.json()] == ["error"]
    assert words in response.json()["error"]


def test_clients_of_different_sizes_receive_their_own_rows(url, estimator):
    """While the first request sleeps, the others become one batch; one of them has a wrong shape."""
    rng = np.random.default_rng(4)
    queries = [rng.uniform(-1, 1, size=shape) for shape in ((1, 2), (3, 2), (2, 3), (200, 2))]
    queries[0][0, 0] = 2 * BRAKE

    def ask(row):
        time.sleep(0.2 * (row > 0))
        return post(url, INFER, tensor(queries[row])).json()

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(ask, range(4))]
    assert "rows of shape" in found.pop(2)["error"]
    for x, answer in zip(queries[:2] + queries[3:], found, strict=True):
        np.testing.assert_allclose(answer["outputs"][1]["data"], estimator.bound(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "content", "kind", "words"),
    [
        ("/Evaluate", {"name": "posterior", "input": [[0, 0]]}, "ModelNotFound", "there is no model"),
        ("/Evaluate", [], "ModelNotFound", "there is no model"),
        ("/Evaluate", {"name": "bound", "input": [[]]}, "InvalidInput", "one vector of 2 numbers"),
        ("/Evaluate", {"name": "bound", "input": [["NaN", 0]]}, "InvalidInput", "numbers alone"),
        ("/Evaluate", {"name": "bound", "input": [[0]]}, "InvalidInput", "one vector of 2 numbers"),
        ("/Evaluate", {"name": "bound", "input": [["a", 0]]}, "InvalidInput", "numbers alone"),
        ("/Evaluate", {"name": "bound", "input": [[None, 0]]}, "InvalidInput", "missing value"),
        ("/Evaluate", {"name": "bound", "input": [[0, 0]], "config": {"level": 0.9}}, "InvalidInput", "no settings"),
        ("/Gradient", {"name": "bound"}, "UnsupportedFeature", "Gradient"),
        ("/EvaluateShMem", {"name": "bound"}, "UnsupportedFeature", "ShMem"),
        ("/Evaluate", {"name": "bound", "input": [[1e300, 0]]}, "InvalidOutput", "NOT safe"),
        ("/Evaluate", {"name": "bound", "input": [[BRAKE, 0]]}, "InvalidOutput", "RuntimeError: the mesh is tangled"),
    ],
)  # fmt: skip
def test_a_bad_call_is_refused_with_a_type_of_umbridge(url, path, content, kind, words):
    response = post(url, path, content)
    assert response.status_code == (500 if "RuntimeError" in words else 400)
    assert response.json()["error"]["type"] == kind
    assert words in response.json()["error"]["message"]


def test_requests_are_answered_together_and_one_that_fails_fails_alone(url, estimator):
    """While the surrogate sleeps in the first request, the others wait; then they are one batch, with one query that raises."""
    x = np.random.default_rng(2).uniform(-1, 1, size=(12, 2))
    x[0, 0], x[5, 0] = 2 * BRAKE, BRAKE

    def ask(row):
        time.sleep(0.2 * (row > 0))
        return post(url, "/Evaluate", {"name": "bound", "input": [x[row].tolist()]})

    def batches():
        text = requests.get(url + "/metrics", timeout=10).text
        return float(re.search(r"geoq_batch_queries_count (\S+)", text)[1])

    before = batches()
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(ask, range(12))]
    assert [answer.status_code for answer in answers] == [200, *[200] * 4, 500, *[200] * 6]
    good = [i for i in range(12) if i not in (0, 5)]
    found = [answers[i].json()["output"][0][0] for i in good]
    np.testing.assert_allclose(found, estimator.bound(x[good]), rtol=1e-6)
    # The first request, and the others one by one since their batch failed.
    assert batches() - before == 1 + len(good)


def test_huge_slow_and_unknown_requests_end(url):
    huge = post(url, INFER, tensor(np.zeros((100_000, 2))))
    assert huge.status_code == 413
    endless = requests.post(url + "/Evaluate", data=(b" " * 10_000 for _ in range(200)), timeout=10)
    assert endless.status_code == 413
    assert "does not exist" in requests.get(url + "/v3", timeout=10).json()["error"]
    assert requests.get(url + "/Evaluate", timeout=10).status_code == 405
    host, port = url.removeprefix("http://").split(":")
    ends, cut = [], b"POST /Evaluate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    for head in (b"POST /Eval", cut):  # the rest never comes
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head)
            ends.append(connection.recv(1000)[:12])
    assert ends == [b"", b"HTTP/1.1 408"]
    foreign = requests.get(url + "/Info", headers={"Host": "evil.example"}, timeout=10)
    assert "not a name of this service" in foreign.json()["error"]


def test_a_token_is_needed_if_there_is_one(estimator):
    with running(estimator, token="secret") as address:
        codes = [
            requests.get(address + path, headers={"Authorization": given}, timeout=10).status_code
            for path in ("/Info", "/v2/health/live")
            for given in ("", "Bearer secret", "Bearer wrong")
        ]
    assert codes == [401, 200, 401, 200, 200, 200]


def test_another_host_without_a_token_gives_a_warning(estimator):
    with pytest.warns(UserWarning, match="without a token"):
        server_of(estimator, host="0.0.0.0")  # does not run


def test_a_monitor_of_another_estimator_and_an_estimator_before_fit_are_refused(estimator):
    with pytest.raises(ValueError, match="observes another estimator"):
        server_of(estimator, monitor=Monitor(calibrated()))
    with pytest.raises(ValueError, match="not fitted"):
        server_of(GeoQ(surrogate, None))


@pytest.mark.parametrize("needed", ["orjson", "uvicorn"])
def test_the_command_without_the_extra_names_the_command_that_installs_it(needed):
    program = f"import sys; sys.modules['{needed}'] = None; from geoq.cli import main; "
    program += "sys.exit(main(['serve', 'model.geoq', '--surrogate', 'math:sin']))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'geoq: geoq.serving needs a web server; pip install "geoq[serve]".\n'


def test_the_monitor_observes_and_receives_results(estimator, tmp_path):
    monitor = Monitor(estimator, verify=0.5, folder=tmp_path)
    x = np.random.default_rng(3).uniform(-1, 1, size=(40, 2))
    with running(estimator, monitor=monitor) as address:
        drawn = infer(address, x, ["verify"]).as_numpy("verify")
        aside = tensor(x) | {"parameters": {"observe": False}}
        assert post(address, INFER, aside).status_code == 200
        results = tensor(x[drawn])
        results["inputs"] += tensor(truth(x[drawn]), "y")["inputs"]
        status = post(address, "/monitor", results).json()
        text = requests.get(address + "/metrics", timeout=10).text
        assert status == requests.get(address + "/monitor", timeout=10).json()
    assert status["numbers"]["queries"] == 40
    assert status["numbers"]["drawn"] == drawn.sum() > 10
    assert status["numbers"]["outstanding"] == 0
    assert f'geoq_monitor{{number="drawn"}} {drawn.sum():.1f}' in text
    assert Monitor(estimator, verify=0.5, folder=tmp_path).status().numbers["queries"] == 40


def load(url, estimator, n_clients, seconds):
    """Answers of parallel clients, each with queries of its own, and the time of each request."""
    end = time.monotonic() + seconds

    def client(seed):
        rng, times, wrong = np.random.default_rng(seed), [], 0
        with requests.Session() as session:
            while not times or (time.monotonic() < end and len(times) < 2000):
                x = rng.uniform(-1, 1, size=(1, 2))
                started = time.perf_counter()
                asked = {"name": "bound", "input": x.tolist()}
                found = session.post(url + "/Evaluate", json=asked, timeout=300).json()["output"]
                times.append(time.perf_counter() - started)
                wrong += not np.allclose(found[0], estimator.bound(x), rtol=1e-6)
        return times, wrong

    with ThreadPoolExecutor(n_clients) as pool:
        found = [*pool.map(client, range(n_clients))]
    return np.concatenate([times for times, _ in found]), sum(wrong for _, wrong in found)


def test_a_hundred_parallel_clients_receive_no_wrong_answer(estimator):
    """For the time in the variable GEOQ_LOAD_SECONDS; ``make load`` takes a minute."""
    seconds = float(os.environ.get("GEOQ_LOAD_SECONDS", "2"))
    with running(estimator) as address:
        times, wrong = load(address, estimator, 100, seconds)
    assert wrong == 0
    assert len(times) >= 100


SCRIPT = """
import time
def predict(x):
    time.sleep(1.0 if (x[:, 0] == 154.0).any() else 0)
    return 3 * x[:, 0] - 4 * x[:, 0] ** 3 + x[:, 1]
"""


def test_the_command_serves_a_file_and_finishes_what_is_under_way(estimator, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    estimator.save(tmp_path / "model.geoq")
    command = f"{sys.executable} -m geoq serve model.geoq --surrogate mine:predict --port 0".split()
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        address = process.stderr.readline().split(" served at ")[1].strip()
        with ThreadPoolExecutor(1) as pool:
            asked = {"name": "prediction", "input": [[154.0, 1.0]]}
            slow = pool.submit(post, address, "/Evaluate", asked)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert slow.result().json() == {"output": [[surrogate(np.array([[154.0, 1.0]]))[0]]]}
        assert process.wait(timeout=10) in (0, -signal.SIGTERM)


def test_the_page_shows_prediction_bound_flag_and_reason(url, estimator, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    assert not re.search(r"https?://(?!www\.w3\.org)|<script src|<link|@import", HTML)
    options = (
        "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-sync"
    )
    options += (
        f" disable-component-update user-data-dir={tmp_path} virtual-time-budget=3000 dump-dom"
    )
    command = [chromium, *(f"--{option}" for option in options.split())]
    for point, flag in (([0.3, -0.2], ">safe<"), ([1.4, -0.2], "not safe: the bound is a guess")):
        address = f"{url}/#{','.join(map(str, point))}"
        shown = subprocess.check_output([*command, address], text=True, timeout=60)
        answer = estimator.assess(np.array([point]))
        numbers = f"<td>{answer.prediction[0]:.4g}</td><td>{answer.error_hat[0]:.4g}</td>"
        for part in (flag, numbers, answer.explanation(0), "<polygon"):
            assert part in shown
