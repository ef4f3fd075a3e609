"""Signs in the tables for rows that another run measured, at another commit or on another machine than the rest of the file."""

import re


def marks(rows):
    """Signs for the runs of rows that were measured by another run than the rest of the table."""
    runs = dict.fromkeys(r["run"] for r in rows if "run" in r)
    return dict(zip(runs, "†‡§", strict=False))


def marked(rows, method, setting):
    """The name of a method, with the sign of its run."""
    runs = {
        r["run"]
        for r in rows
        if (r["method"], r["setting"]) == (method, setting) and "run" in r
    }
    signs = [sign for run, sign in marks(rows).items() if run in runs]
    return " ".join([method, *signs])


def other_runs(rows):
    """Explanation of the signs, if there are any."""
    signs = [f"{sign} {run}." for run, sign in marks(rows).items()]
    return [" ".join(signs)] if signs else []


def with_signs(text, rows):
    """Tables with the signs of other runs after the names of the methods."""
    for sign in marks(rows).values():
        for method in dict.fromkeys(r["method"] for r in rows if "run" in r):
            start = re.escape(f"| {method} |")
            text = re.sub(f"^{start}", f"| {method} {sign} |", text, flags=re.MULTILINE)
    return text
