"""Random damage of files, and forged files whose checksum is right."""

import json
import warnings
from collections import Counter

import numpy as np
import torch

from geoq import archive

KINDS = (
    "bit",
    "byte",
    "header",
    "cut",
    "append",
    "remove",
    "repeat",
    "zeros",
    "splice",
)
IMPOSSIBLE = (None, "x", -1, 0, 1e400, float("nan"), [], {}, True, 10**9, [[1]], 2.5)


def damaged(content, other, rng):
    """The content after one random change, and the kind of the change."""
    kind, data = str(rng.choice(KINDS)), bytearray(content)
    place = int(rng.integers(len(data)))
    length = int(rng.integers(1, 200))
    if kind in ("bit", "header"):
        n_header = 8 + int.from_bytes(content[:8], "little")
        place = place if kind == "bit" else int(rng.integers(n_header))
        data[place] ^= 1 << int(rng.integers(8))
    elif kind == "byte":
        data[place] = int(rng.integers(256))
    elif kind == "cut":
        del data[place:]
    elif kind == "append":
        data += rng.bytes(length)
    elif kind == "remove":
        del data[place : place + length]
    elif kind == "repeat":
        data[place:place] = data[place : place + length]
    elif kind == "zeros":
        data[place : place + length] = bytes(len(data[place : place + length]))
    else:
        data[place:] = other[place:]
    return bytes(data), kind


def places_in(value, path=()):
    """All places of a nested structure of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, part in items:
        yield from places_in(part, (*path, key))


def forged(numbers, arrays, rng):
    """Numbers and arrays after one change, and what was changed."""
    numbers, arrays = json.loads(json.dumps(numbers)), dict(arrays)
    if rng.random() < 0.5:
        path = list(places_in(numbers))[1:]
        path = path[int(rng.integers(len(path)))]
        parent = numbers
        for key in path[:-1]:
            parent = parent[key]
        if rng.random() < 0.3:
            del parent[path[-1]]
        else:
            parent[path[-1]] = IMPOSSIBLE[int(rng.integers(len(IMPOSSIBLE)))]
        return numbers, arrays, "number"
    name = sorted(arrays)[int(rng.integers(len(arrays)))]
    changes = (
        lambda _: None,
        lambda a: a[:-1] if a.ndim else a[None],
        lambda a: (
            torch.full_like(a, torch.nan) if a.is_floating_point() else -1 - a.int()
        ),
        lambda a: -1e9 * (a.double() + 1),
        lambda a: a.reshape(-1)[:0],
        lambda a: a[None],
        lambda a: torch.full(a.shape, torch.inf),
    )
    changed = changes[int(rng.integers(len(changes)))](arrays.pop(name))
    if changed is not None:
        arrays[name] = changed
    return numbers, arrays, "array"


def same(one, other):
    """Whether two lists of arrays are equal, bit for bit."""
    return len(one) == len(other) and all(
        a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(one, other, strict=True)
    )


def outcome(case, path):
    """What became of a file: refused, refused unclearly, the same answers, or other answers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers = case.answers(case.load(path))
    except (ValueError, FileNotFoundError):
        return "refused"
    except Exception as exc:  # noqa: BLE001
        return f"unclear: {type(exc).__name__}"
    return "same" if same(answers, case.expected) else "wrong"


def count_damage(cases, n_tries, folder, rng):
    """Outcomes of random damage, by kind of estimator."""
    contents, counts = {}, {case.name: Counter() for case in cases}
    for number, case in enumerate(cases):
        case.fitted.save(folder / f"{number}.geoq")
        contents[case.name] = (folder / f"{number}.geoq").read_bytes()
    target = folder / "damaged.geoq"
    for attempt in range(n_tries):
        case = cases[attempt % len(cases)]
        other = contents[cases[int(rng.integers(len(cases)))].name]
        target.write_bytes(damaged(contents[case.name], other, rng)[0])
        counts[case.name][outcome(case, target)] += 1
    return counts


def count_forged(cases, n_tries, folder, rng):
    """Outcomes of changes whose checksum was computed again."""
    counts = {case.name: Counter() for case in cases}
    for attempt in range(n_tries):
        case = cases[attempt % len(cases)]
        target = folder / "forged.geoq"
        case.fitted.save(target)
        numbers, arrays, _ = forged(*archive.read(target), rng)
        archive.write(target, numbers, arrays)
        counts[case.name][outcome(case, target)] += 1
    return counts
