"""The report as HTML, Markdown and JSON with the same content."""

import json
from html import escape
from importlib.resources import files
from typing import Any

from geoq.report.contents import Part, Report

TITLE = "Error bounds of a surrogate"
HEAD = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'


def _shown(cell: Any) -> str:
    text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return "unknown" if text in ("nan", "inf", "-inf") else text


def to_html(report: Report) -> str:
    """One page without scripts and without references to anything outside."""
    style, body = files("geoq.report").joinpath("style.css").read_text(), f"<h1>{TITLE}</h1>"
    for title, parts in report.items():
        body += f"\n<section><h2>{escape(title)}</h2>\n{''.join(map(_html, parts))}</section>"
    head = f"{HEAD}<title>{TITLE}</title>\n<style>{style}</style></head>"
    return f"{head}\n<body>{body}</body></html>\n"


def _html(part: Part) -> str:
    text, names, table = escape(part["text"]), [*map(escape, part["columns"])], ""
    for row in part["rows"]:
        cells = zip(names, map(escape, map(_shown, row)), strict=True)
        named = (f'<td data-name="{name}">{cell}</td>' for name, cell in cells)
        table += f"<tr>{''.join(named)}</tr>"
    if table:
        head = "".join(f"<th>{name}</th>" for name in names)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table>"
    if not part["chart"]:
        return f"<p>{text}</p>{table}\n" if text else table
    folded = f"<details><summary>Numbers</summary>{table}</details>" if table else ""
    return f"<figure><figcaption>{text}</figcaption>{part['chart']}{folded}</figure>\n"


def to_markdown(report: Report) -> str:
    """A model card: the sentences and the tables, without the pictures."""
    lines = [f"# {TITLE}"]
    for title, parts in report.items():
        lines += ["", f"## {title}"]
        for part in parts:
            rows = [part["columns"], ["---"] * len(part["columns"]), *part["rows"]]
            lines += ["", _plain(part["text"])] if part["text"] else []
            lines += [""] if part["rows"] else []
            lines += [f"| {' | '.join(map(_plain, row))} |" for row in rows if part["rows"]]
    return "\n".join(lines) + "\n"


def _plain(cell: Any) -> str:
    """Text in which no character is markup."""
    marked = "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in _shown(cell))
    return " ".join(marked.split())


def to_json(report: Report) -> str:
    """The sentences and the tables with all digits; a number that is not finite is null."""
    sections = {
        title: [{name: part[name] for name in ("text", "columns", "rows")} for part in parts]
        for title, parts in report.items()
    }
    finite = json.loads(json.dumps(sections), parse_constant=lambda _: None)
    return json.dumps({"title": TITLE, "sections": finite}, indent=1, ensure_ascii=False) + "\n"


FORMATS = {".html": to_html, ".md": to_markdown, ".json": to_json}
