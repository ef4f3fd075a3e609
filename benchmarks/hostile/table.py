"""Markdown table of the outcomes of all attacks."""

ATTACKS = (
    "damaged files",
    "forged files",
    "kills during fit",
    "kills during save",
    "two processes, one checkpoint",
    "two processes, one file",
    "full disk",
    "limited file size",
)
NAMED = ("refused", "same", "wrong")
APART = ("attack", "target", "seed", "kills", "leftovers", "skipped", *NAMED)


def total(rows, key):
    return sum(row.get(key, 0) for row in rows)


def cells(rows):
    """Outcomes of one attack; refusals before the training of a calibration are refusals."""
    if any(row.get("skipped") for row in rows):
        return "skipped on this machine | - | - | -"
    others = {key: total(rows, key) for row in rows for key in row if key not in APART}
    unclear = sum(n for key, n in others.items() if key.startswith("unclear"))
    refused = total(rows, "refused") + others.get("refused before training", 0)
    refused += unclear
    n = refused + total(rows, "same") + total(rows, "wrong")
    kills = f" ({total(rows, 'kills')} kills)" if total(rows, "kills") else ""
    return f"{n}{kills} | {refused} | {total(rows, 'same')} | {total(rows, 'wrong')}"


def summary(record):
    """One line per attack; damaged and forged files also by kind of estimator."""
    lines = [
        "| attack | tries | refused | right answer | other answer |",
        "|---|---|---|---|---|",
    ]
    for attack in ATTACKS:
        rows = [row for row in record["rows"] if row["attack"] == attack]
        if rows:
            lines.append(f"| {attack} | {cells(rows)} |")
    by_file = [row for row in record["rows"] if row["attack"] == "damaged files"]
    if by_file:
        lines += [
            "",
            "| damaged files by estimator | tries | refused | right answer | other answer |",
            "|---|---|---|---|---|",
            *(f"| {row['target']} | {cells([row])} |" for row in by_file),
        ]
    return "\n".join(lines)
