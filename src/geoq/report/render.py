"""The report as HTML, Markdown and JSON with the same content."""

import json
import math
from html import escape
from importlib.resources import files
from typing import Any

from geoq.report.contents import Part, Report

TITLE = "Error bounds of a surrogate"


def _shown(cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.4g}" if math.isfinite(cell) else "unknown"


def to_html(report: Report) -> str:
    """One page without scripts and without references to anything outside."""
    style = files("geoq.report").joinpath("style.css").read_text()
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head = f"<head>{meta}<title>{TITLE}</title>\n<style>{style}</style></head>"
    sections = (
        f"<section><h2>{escape(title)}</h2>\n{''.join(map(_html, parts))}</section>"
        for title, parts in report.items()
    )
    body = "\n".join([f"<h1>{TITLE}</h1>", *sections])
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n<body>{body}</body></html>\n'


def _html(part: Part) -> str:
    text, names = escape(part["text"]), [escape(name) for name in part["columns"]]
    rows = ""
    for row in part["rows"]:
        cells = (escape(_shown(cell)) for cell in row)
        named = [f'<td data-name="{n}">{c}</td>' for n, c in zip(names, cells, strict=True)]
        rows += f"<tr>{''.join(named)}</tr>"
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    if not part["chart"]:
        return f"<p>{text}</p>{table}\n" if text else table
    folded = f"<details><summary>Numbers</summary>{table}</details>" if rows else ""
    return f"<figure><figcaption>{text}</figcaption>{part['chart']}{folded}</figure>\n"


def to_markdown(report: Report) -> str:
    """A model card: the sentences and the tables, without the pictures."""
    lines = [f"# {TITLE}"]
    for title, parts in report.items():
        lines += ["", f"## {title}"]
        for part in parts:
            rows = [part["columns"], ["---"] * len(part["columns"]), *part["rows"]]
            table = [f"| {' | '.join(_plain(_shown(c)) for c in row)} |" for row in rows]
            lines += ["", _plain(part["text"])] if part["text"] else []
            lines += ["", *table] if part["rows"] else []
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text in which no character is markup."""
    marked = "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)
    return " ".join(marked.split())


def to_json(report: Report) -> str:
    """The sentences and the tables with all digits; a number that is not finite is null."""

    def value(cell: Any) -> Any:
        return None if isinstance(cell, float) and not math.isfinite(cell) else cell

    sections = {
        title: [
            {n: p[n] for n in ("text", "columns")}
            | {"rows": [[*map(value, row)] for row in p["rows"]]}
            for p in parts
        ]
        for title, parts in report.items()
    }
    return json.dumps({"title": TITLE, "sections": sections}, indent=1, ensure_ascii=False) + "\n"


FORMATS = {".html": to_html, ".md": to_markdown, ".json": to_json}
