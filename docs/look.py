"""``make docs-look``: opens every page of build/site in Chromium, 360 pixels wide, and prints the pages that are wider than that."""

import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SITE, WIDTH = Path("build/site"), 360
# Pages are opened in a frame, because a window of Chromium cannot be this narrow.
LOOK = """<body><iframe width="{width}" height="800"></iframe><pre></pre><script>
const frame = document.querySelector("iframe"), pages = {pages};
const next = () => {{
  const page = pages.shift();
  if (!page) return document.body.append("all pages were opened");
  frame.onload = () => {{
    // The theme lets the article scroll sideways in place of the page.
    const boxes = frame.contentDocument.querySelectorAll("html, .bd-article-container");
    const wide = Math.max(...[...boxes].map(box => box.scrollWidth));
    if (wide > {width}) document.querySelector("pre").append(`${{page}}: ${{wide}}\\n`);
    next();
  }};
  frame.src = page;
}};
next();
</script>"""
FLAGS = "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-sync disable-component-update dump-dom"


def main() -> int:
    """The exit code: 0 if every page was opened and none is too wide."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    pages = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html"))
    pages = [page for page in pages if not page.startswith(("_static", "index"))]
    if chromium is None or not pages:
        sys.exit("docs-look needs Chromium, and the site of make docs.")
    (SITE / "look.html").write_text(LOOK.format(width=WIDTH, pages=pages))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory() as profile:
            options = [f"--{flag}" for flag in FLAGS.split()]
            options += [f"--user-data-dir={profile}", "--virtual-time-budget=600000"]
            command = [chromium, *options, f"http://127.0.0.1:{server.server_port}/look.html"]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        server.shutdown()
    (SITE / "look.html").unlink()
    wide = shown.partition("<pre>")[2].partition("</pre>")[0].split("\n")[:-1]
    print(*wide, f"{len(pages)} pages, {len(wide)} of them wider than {WIDTH} pixels", sep="\n")
    return int(bool(wide) or "all pages were opened" not in shown.partition("</script>")[2])


if __name__ == "__main__":
    sys.exit(main())
