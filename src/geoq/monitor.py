r"""A monitor of a calibrated estimator in use, with alarms that are valid whenever they are looked at (docs/monitor.md).

Three hypotheses are tested after every query: the fraction of queries that are not safe is at most what the calibration explains, their
distances are exchangeable with the reference, and the bounds of verified safe queries have their coverage. A test is a mixture of bets:

.. math:: M_n = \frac{1}{n + 1} + \frac{1}{J} \sum_j \sum_{k \le n} \frac{1}{k (k + 1)} \prod_{i = k}^n L_j(x_i)

While the hypothesis holds, :math:`M_n` ever exceeds :math:`1 / \alpha` with at most the probability :math:`\alpha` (Ville).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, betaln, xlog1py, xlogy

from geoq import checks
from geoq.arrays import to_numbers
from geoq.core.assessment import Assessment
from geoq.core.conformal import ConformalFactors, checked_pairs
from geoq.core.estimator import GeoQ
from geoq.core.update import tracked
from geoq.quantiles import error_ratios
from geoq.training.checkpoint import array_id, replaced

__all__ = ["Monitor", "Status"]

# Alternatives: odds as multiples of the odds of the hypothesis, exponents of tail probabilities of distances.
ODDS, EXPONENTS = np.array([1.5, 2, 3, 5, 10, 30, 100]), np.array([0.7, 0.5, 0.3, 0.15])
FILE, LOG = "monitor.json", "monitor.jsonl"
ALARMS = {
    "unsafe": "query {}: too many queries are not safe",
    "distance": "query {}: the queries are farther from the data than the reference",
    "coverage": "verified query {}: the bounds of safe queries cover too few errors",
}


def stepped(capital: np.ndarray, gain: np.ndarray, n: int) -> np.ndarray:
    """The capital of all bets after observation n, counted from 1; the limit avoids an overflow after an alarm."""
    return np.minimum((capital + 1 / (n * (n + 1))) * gain, 1e100)


def evidence(capital: np.ndarray, n: int) -> np.ndarray:
    """M after n observations: the mean capital, and what is left for later bets."""
    return np.asarray(capital.mean(axis=-1) + 1 / (n + 1))


def gains_of_fraction(x: Any, most: float) -> np.ndarray:
    r"""Bets against the hypothesis that numbers in [0, 1] have at most the mean ``most``, called p.

    .. math:: L_q(x) = (q / p)^x \, ((1 - q) / (1 - p))^{1 - x}, \qquad q > p

    L is convex in x, so its expectation is at most 1 for fractions as well as for zeros and ones.
    """
    odds = ODDS * most / (1 - most)
    q, x = odds / (1 + odds), np.asarray(x, dtype=float)[..., None]
    return np.asarray((q / most) ** x * ((1 - q) / (1 - most)) ** (1 - x))


def bins_of_gaps(n_gaps: int) -> np.ndarray:
    """Numbers of gaps in bins, the nearest first: a half of the gaps, a quarter, and so on, down to one gap."""
    left = n_gaps // 2 ** np.arange(n_gaps.bit_length())
    return np.append(left[:-1] - left[1:], 1)


def gains_of_rank(counts: np.ndarray, place: Any) -> np.ndarray:
    r"""Bets against exchangeability with the reference, with alternatives of tail probability :math:`V^\kappa`.

    The next query falls into each gap between earlier values with the same probability; ``counts`` has the gaps per bin.
    """
    tail = np.flip(np.cumsum(np.flip(counts, -1), -1), -1) / counts.sum(-1, keepdims=True)
    tail, where = np.append(tail, 0 * tail[..., :1], axis=-1), np.asarray(place)[..., None]
    upper, lower = (np.take_along_axis(tail, where + i, -1) for i in (0, 1))
    return np.asarray((upper**EXPONENTS - lower**EXPONENTS) / (upper - lower))


def upper_limit(n_found: int, n: int, level: float) -> float:
    """Upper confidence limit of a fraction, of which n_found of n were found (Clopper and Pearson); below 1."""
    return min(float(betaincinv(n_found + 1, max(n - n_found, 1), 1 - level)), 0.999)


def interval(total: float, n: int, level: float) -> tuple[float, float]:
    """Confidence interval of the mean of n numbers in [0, 1] with this sum, valid for all n together: the beta mixture of Robbins."""
    mixture = betaln(0.5 + total, 0.5 + n - total) - betaln(0.5, 0.5) + math.log(level)

    def excess(mean: float) -> float:
        return float(mixture - xlogy(total, mean) - xlog1py(n - total, -mean))

    mean, (low, high) = total / max(n, 1), (1e-12, 1 - 1e-12)
    lower = brentq(excess, low, mean) if mean > low and excess(low) > 0 else 0.0
    upper = brentq(excess, max(mean, low), high) if mean < high and excess(high) > 0 else 1.0
    return float(lower), float(upper)


@dataclass(frozen=True)
class Status:
    """What a monitor has found: ``numbers`` by name, and a sentence per alarm; ``print(status)`` states both in words.

    The intervals hold at all times together. Evidence of 1 or more raises the alarm of a test, which stays.
    """

    numbers: dict[str, Any]
    alarms: tuple[str, ...]

    def __str__(self) -> str:
        text = (
            "{queries} queries: {unsafe:.3g} not safe ({unsafe_interval[0]:.3g} to {unsafe_interval[1]:.3g}; explained: {unsafe_limit:.3g}), "
            "{far:.3g} far (expected: 0.125)\n{drawn} drawn for verification, {outstanding} of them without a result"
        )
        if self.numbers["verified"]:
            text += "\ncoverage of {verified} verified safe queries {coverage:.3g}"
            text += " ({coverage_interval[0]:.3g} to {coverage_interval[1]:.3g}), tracked factor {factor:.3g}"
        if self.numbers["chosen"]:
            text += "\n{chosen} results of queries that were not drawn; they do not count"
        return "\n".join([text.format(**self.numbers), *(self.alarms or ["no alarm"])])


class Monitor:
    """Observes the queries of a calibrated estimator, draws some of them for verification, and raises alarms.

    Args:
        estimator: a fitted ``GeoQ``; a monitor belongs to one calibration.
        planned: queries drawn as later queries will be. None takes the held-out points, for queries that are drawn like the data.
        level: the probability of any alarm in a stable stream, at most.
        verify: the fraction of the queries that are drawn for verification.
        folder: a folder for the state and the log, for one process. None keeps the state in memory.
        random_state: the seed of the draws. They do not depend on how queries are grouped.
    """

    def __init__(
        self,
        estimator: Any,
        planned: Any = None,
        level: float = 0.05,
        verify: float = 0.02,
        *,
        folder: str | Path | None = None,
        random_state: int = 0,
    ) -> None:
        checks.check_object(estimator, GeoQ, "estimator", "GeoQ(surrogate, train).fit(x, y)")
        checks.check_fitted(estimator)
        checks.check_quantile(level, "level", "probability of an alarm", 0.05)
        checks.check_fraction(verify, "verify")
        self.estimator, self.level, self.verify = estimator, level, verify
        self._fitted = fitted = estimator.fitted_
        self.random_state, self.folder = random_state, None if folder is None else Path(folder)
        distance, n_unsafe = self._reference(fitted, planned)
        self._distance, self._gaps = np.sort(distance), bins_of_gaps(len(distance) + 1)
        # The reference is finite: half of the level of the first test is for the upper confidence limit of its fraction.
        own = level / len(ALARMS)
        self._most = upper_limit(n_unsafe, len(distance), own / 2)
        self.limits = {"unsafe": 2 / own, "distance": 1 / own, "coverage": 1 / own}
        arrays = fitted.geometry.points.inputs, fitted.error, self._distance
        settings = fitted.conformal, fitted.quantile, level, verify, random_state
        of = sha256("".join([*map(array_id, arrays), repr(settings)]).encode()).hexdigest()
        # Verified queries that are safe or not: their number, and the sum of the fractions of values outside the bounds.
        state: dict[str, Any] = {"of": of, "safe": [0, 0.0], "other": [0, 0.0], "pending": {}}
        state |= dict.fromkeys(("queries", "unsafe", "drawn", "chosen"), 0) | {"alarms": {}}
        bets = {"unsafe": len(ODDS), "distance": len(EXPONENTS), "coverage": len(ODDS)}
        state |= {"capital": {t: [0.0] * n for t, n in bets.items()}, "bins": [0] * len(self._gaps)}
        state |= {"n": dict.fromkeys(bets, 0), "factors": astuple(ConformalFactors())}
        self._state = state if self.folder is None else _stored(self.folder, state)

    def _reference(self, fitted: Any, planned: Any) -> tuple[np.ndarray, int]:
        """Distances of the planned queries or of the held-out points, and how many of them are not safe."""
        if planned is not None:
            answer, lost = fitted.parts_of(fitted.rows_of(planned))
            return answer["support_distance"][~lost], int((~answer["safe"]).sum())
        quantile = getattr(fitted.region, "quantile", None)
        if fitted.tuples is None or quantile is None:
            raise ValueError("the calibration has no reference; pass planned, typical queries.")
        inner = fitted.tuples[fitted.tuples.interpolating]
        return inner.relation.support_distance, math.ceil((1 - quantile) * len(inner))

    def _known(self) -> Any:
        if self.estimator.fitted_ is not self._fitted:
            raise ValueError("the estimator has another calibration now; make a new monitor.")
        return self._fitted

    def observe(self, x: Any) -> tuple[Assessment, np.ndarray]:
        """Assess queries and count them; returns the assessment, and the rows to verify by the simulator."""
        self._known()
        answer, state = self.estimator.assess(x), self._state
        unsafe = ~to_numbers(answer.safe, "safe").astype(bool)
        n, first, n_unsafe = len(answer), state["queries"] + 1, int(unsafe.sum())
        # Two random numbers per query: for the draw, and for its place among equal distances.
        bits = np.random.PCG64(self.random_state).advance(2 * state["queries"])
        random = np.random.Generator(bits).random((n, 2))
        distance = to_numbers(answer.support_distance, "support_distance")
        low, high = (np.searchsorted(self._distance, distance, side) for side in ("left", "right"))
        gap = low + (random[:, 1] * (high - low + 1)).astype(int)
        places = np.searchsorted(np.cumsum(self._gaps), gap[~answer.lost], "right")
        falls = np.eye(len(self._gaps), dtype=int)[places]
        before = self._gaps + state["bins"] + falls.cumsum(axis=0) - falls
        self._bet("unsafe", gains_of_fraction(unsafe, self._most))
        known = (first + np.flatnonzero(~answer.lost)).tolist()
        self._bet("distance", gains_of_rank(before, places), known)
        drawn = np.flatnonzero((random[:, 0] < self.verify) & ~answer.lost)
        lines = [{"query": first, "observed": n, "unsafe": n_unsafe, "alarms": [*state["alarms"]]}]
        inputs = to_numbers(answer.asked, "x")[drawn]
        for row, key, values in zip(drawn.tolist(), _keys(inputs), inputs, strict=True):
            state["pending"].setdefault(key, []).append(first + row)
            lines.append({"query": first + row, "verify": values.tolist()})
        state["bins"] = (falls.sum(axis=0) + state["bins"]).tolist()
        for name, more in (("queries", n), ("unsafe", n_unsafe), ("drawn", len(drawn))):
            state[name] += more
        self._write(*lines)
        return answer, drawn

    def verified(self, x: Any, y: Any) -> None:
        """Count the reference outputs of drawn queries, in any order.

        Other queries may have been chosen because they look suspicious: they are counted as ``chosen`` and do not enter the coverage.
        """
        fitted, state = self._known(), self._state
        pairs = checked_pairs(fitted, x, y)
        error = pairs.error if fitted.exact is None else np.where(fitted.exact, np.nan, pairs.error)
        ratio, drawn = error_ratios(error, pairs.answer["error_hat"]), np.zeros(len(error), int)
        for i, key in enumerate(_keys(pairs.queries)):
            drawn[i], *later = state["pending"].pop(key, [0])
            state["pending"] |= {key: later} if later else {}
        state["chosen"] += int((drawn == 0).sum())
        counts = (drawn > 0) & ~np.isnan(ratio).all(axis=1)
        ratio, safe = ratio[counts], pairs.answer["safe"][counts]
        outside = np.nanmean(np.where(np.isnan(ratio), np.nan, ratio > 1), axis=1)
        self._bet("coverage", gains_of_fraction(outside[safe], 1 - fitted.quantile))
        for name, own in (("safe", outside[safe]), ("other", outside[~safe])):
            state[name] = [state[name][0] + len(own), state[name][1] + float(own.sum())]
        factors = ConformalFactors(*state["factors"])
        ratio = ratio / np.where(safe, *factors.used[::-1])[:, None]
        state["factors"] = astuple(tracked(factors, ratio, safe, fitted.quantile))
        found = zip(drawn[counts].tolist(), outside.tolist(), strict=True)
        self._write(*({"query": number, "outside": fraction} for number, fraction in found))

    def _bet(self, test: str, gains: np.ndarray, numbers: Sequence[int] = ()) -> None:
        """Further observations of a test; an alarm names one of the numbers, or counts the observations."""
        state, n = self._state, self._state["n"][test]
        capital = np.array(state["capital"][test])
        for gain, number in zip(gains, numbers or range(n + 1, n + 1 + len(gains)), strict=True):
            n += 1
            capital = stepped(capital, gain, n)
            if test not in state["alarms"] and evidence(capital, n) >= self.limits[test]:
                state["alarms"][test] = number
        state["capital"][test], state["n"][test] = capital.tolist(), n

    def _write(self, *lines: dict[str, Any]) -> None:
        """Append to the log, then replace the state."""
        if self.folder is not None:
            time = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
            with (self.folder / LOG).open("a") as log:
                log.writelines(json.dumps(time | line) + "\n" for line in lines)
            with replaced(self.folder / FILE) as scratch:
                scratch.write_text(json.dumps(self._state))

    def status(self) -> Status:
        """What has been found so far."""
        state = self._state
        (n_safe, outside), (n_other, others) = state["safe"], state["other"]
        low, high = interval(outside, n_safe, self.level)
        bets, n = state["capital"], state["n"]
        numbers = {name: state[name] for name in ("queries", "drawn", "chosen")} | {
            "unsafe": state["unsafe"] / max(state["queries"], 1),
            "unsafe_interval": interval(state["unsafe"], state["queries"], self.level),
            "unsafe_limit": self._most,
            "far": sum(state["bins"][3:]) / max(sum(state["bins"]), 1),
            "outstanding": sum(map(len, state["pending"].values())),
            "verified": n_safe,
            "coverage": 1 - outside / n_safe if n_safe else None,
            "coverage_interval": (1 - high, 1 - low),
            "coverage_of_others": 1 - others / n_other if n_other else None,
            "factor": state["factors"][0],
            "evidence": {t: float(evidence(np.array(bets[t]), n[t])) / self.limits[t] for t in n},
        }
        alarms = (f"ALARM at {ALARMS[test].format(i)}" for test, i in state["alarms"].items())
        return Status(numbers, tuple(alarms))


def _keys(rows: Any) -> list[str]:
    """A fingerprint of each query; adding 0 makes -0 equal to 0."""
    numbers = to_numbers(rows, "x").astype(float) + 0.0
    return [sha256(row.tobytes()).hexdigest()[:24] for row in numbers]


def _stored(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The state in the folder, or this one if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (file := folder / FILE).exists():
        return state
    with checks.add_note_on_error(f"Use another folder, or delete {file} to start again."):
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or found.get("of") != state["of"]:
            raise ValueError(f"{folder} has another calibration, reference or setting.")
    return found
