"""The settings of the site. ``make docs`` builds it from docs/, the README and the published tables, without a connection."""

import re
import warnings
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

from geoq import __version__

HERE = Path(__file__).parent
project, author, version, release = "geoq", "The geoq developers", __version__, __version__
project_copyright = "The geoq developers, BSD-3-Clause"
root_doc = "docs/index"
# The sources are the pages as they stand in the repository, so that their links work here and there.
include_patterns = ["docs/**", "*.md", "benchmarks/*.md", "benchmarks/results/*.md"]
exclude_patterns = ["README.md", "docs/gallery/**", "docs/_*/**"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto"]
autosummary_generate = True
templates_path = [str(HERE / "_templates")]
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "inherited-members": False}
napoleon_use_rtype, napoleon_use_ivar = False, True

html_theme = "pydata_sphinx_theme"
html_title = "geoq"
html_static_path = ["_static"]
html_css_files = ["geoq.css"]
html_extra_path = ["_root"]  # an index.html that leads to docs/index.html
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# The output of an example shows a warning without the folder of this machine.
warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
sphinx_gallery_conf = {
    "examples_dirs": str(HERE / "gallery"),
    "gallery_dirs": str(HERE / "examples"),
    "filename_pattern": r"plot_",
    "backreferences_dir": str(HERE / "api" / "examples"),
    "doc_module": ("geoq",),
    "inspect_global_variables": False,
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 1000,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "thumbnail_size": (400, 280),
}
suppress_warnings = ["config.cache"]  # settings above that are functions


# What the converter of docutils does not read, or draws with the index below the letter.
TEX = {
    r"\\iff": r"\\Leftrightarrow",
    r"\\textstyle": "",
    r"\\tfrac(\d)(\d)": r"\\tfrac{\1}{\2}",
    r"\\(widehat|overline) ?((?:\\mathcal )?(?:\\[a-z]+|\w))": r"\\\1{\2}{}",
}


def for_site(text: str) -> str:
    """A page with titles in place of file names, the index in place of the README, and the gallery that the build makes."""
    text = re.sub(r"\[[\w-]+\.md\](?=\([\w./-]*\.md(?:#[\w-]+)?\))", "[]", text)
    text = re.sub(r"\]\((?:\.\./)*README\.md[^)]*\)", "](/docs/index.md)", text)
    text = re.sub(r"\]\(gallery/(plot_\w+)\.py\)", r"](/docs/examples/\1.rst)", text)
    return text.replace("gallery/GALLERY_HEADER.rst", "examples/index.rst")


def sections() -> dict[str, tuple[str, list[str]]]:
    """The navigation: of each section of docs/index.md its text and the pages that its table lists."""
    index = for_site((HERE / "index.md").read_text())
    parts = re.split(r"^## (.*)\n", index, flags=re.MULTILINE)[1:]
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        pages = re.findall(r"^\| \[.*?\]\(([^)#]+)\)", text, flags=re.MULTILINE)
        found[re.sub(r"\W+", "-", title.lower())] = (f"# {title}\n{text}", pages)
    return found


def toctree(pages: list[str]) -> str:
    lines = [f"/docs/{Path(page).with_suffix('')}".replace("/docs/../", "/") for page in pages]
    return "\n".join(["\n```{toctree}", ":hidden:", "", *lines, "```", ""])


def write_sections(app: Sphinx) -> None:
    """A page for each section of the index, which the header of the site shows."""
    listed = re.findall(r"^   ([\w.]+)$", (HERE / "api.md").read_text(), re.MULTILINE)
    for stub in (HERE / "api").glob("*.rst"):  # of names that are gone
        if stub.stem.removeprefix("geoq.") not in listed:
            stub.unlink()
    (HERE / "sections").mkdir(exist_ok=True)
    for name, (text, pages) in sections().items():
        path = HERE / "sections" / f"{name}.md"
        if len(pages) == 1:
            path.unlink(missing_ok=True)
            continue
        text = re.sub(r"\]\((?=[\w.])(?!https?:)", "](../", text) + toctree(pages)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def read_source(app: Sphinx, name: str, source: list[str]) -> None:
    """The index has the sections as children; published tables are reached from the pages that explain them."""
    if not name.startswith("docs/examples/"):
        source[0] = for_site(source[0])
    if name == root_doc:
        # A section with one page from outside, the gallery, needs no page of its own.
        alone = {name: pages[0] for name, (_, pages) in sections().items() if len(pages) == 1}
        source[0] += toctree([alone.get(name, f"sections/{name}.md") for name in sections()])
    elif name.startswith("benchmarks/") and f"../{name}" not in str(sections()):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def read_mathml(self: object, node: nodes.Element) -> None:
    """Formulas as MathML, which browsers draw without a script."""
    text = re.sub(r"\(eq:\w+\)", "", node.astext())
    for tex, known in TEX.items():
        text = re.sub(tex, known, text)
    block = isinstance(node, nodes.math_block)
    html = tex2mathml(text, as_block=block)
    self.body.append(f'<div class="formula">{html}</div>' if block else html)
    raise nodes.SkipNode


def escape_stars(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """``(n, *field)`` is a shape, no emphasis; the attributes of a dataclass are its parameters."""
    lines[:] = [re.sub(r"(?<![*`\w\\])\*(?=\w)", r"\\*", line) for line in lines]
    lines[:] = [re.sub("^:ivar ", ":param ", line) for line in lines if ":vartype" not in line]


def skip_member(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Settings are described with the class, and methods of scikit-learn by scikit-learn."""
    module = getattr(obj, "__module__", None) or "geoq"
    is_setting = what == "class" and isinstance(obj, type(setup)) and obj.__name__ != name
    return True if is_setting or not module.startswith("geoq") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", escape_stars)
    app.connect("autodoc-skip-member", skip_member)
    app.add_html_math_renderer("mathml", (read_mathml, None), (read_mathml, None))
    app.connect("builder-inited", write_sections, priority=100)
    app.connect("source-read", read_source)


html_math_renderer = "mathml"
