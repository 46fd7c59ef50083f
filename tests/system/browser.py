"""A headless Chromium that opens a page and says what came of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

# Run in the page, once it is there: what a person would see is missing, hidden or cut off.
LOOK = """
<script>
window.addEventListener("load", () => {
  const box = x => x.getBoundingClientRect();
  const scrolls = x => x && (getComputedStyle(x).overflowX == "auto" || scrolls(x.parentElement));
  const name = x => x.tagName + (x.id ? "#" + x.id : "");
  const say = {
    width: innerWidth,
    wide: [...document.querySelectorAll("body *")].filter(x => box(x).right > innerWidth + 1 && !scrolls(x)).map(name),
    empty: [...document.querySelectorAll("table,pre,svg,img")].filter(x => !(box(x).width * box(x).height)).map(name),
    broken: [...document.images].filter(x => !x.naturalWidth).map(x => x.src),
    tables: [...document.querySelectorAll("table")].map(t => [...t.rows].map(r => [...r.cells].map(c => c.innerText))),
    // Text and the first colour that is behind it: [text, behind], as rgb.
    colours: [...document.querySelectorAll("td, th, pre, svg text")].map(x => {
      const clear = y => /rgba?\\(0, 0, 0, 0\\)/.test(getComputedStyle(y).backgroundColor);
      let behind = x;
      while (behind && clear(behind)) behind = behind.parentElement;
      const style = getComputedStyle(x);
      return [x.tagName == "text" ? style.fill : style.color,
              getComputedStyle(behind || document.documentElement).backgroundColor];
    }),
  };
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "look"; out.textContent = JSON.stringify(say);
  document.body.append(out);
});
</script>
"""


def chromium(*words: str) -> str:
    """What Chromium prints; it knows no host but this one, and waits until the page is quiet."""
    command = [str(shutil.which("chromium")), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    network = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"
    done = subprocess.run(
        [*command, network, "--virtual-time-budget=10000", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def look(body: str, folder: Path, width: int = 1000, dark: bool = False) -> dict[str, Any]:
    """What a page with this body looks like, and a screenshot of it in the folder."""
    colours = "background:#111111;color:#dddddd" if dark else "background:#ffffff;color:#222222"
    page = folder / "page.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><body style="{colours}">{body}{LOOK}</body>')
    size = f"--window-size={width},2000"
    chromium(size, f"--screenshot={folder / 'page.png'}", page.as_uri())
    shown = chromium(size, "--dump-dom", page.as_uri())
    found = re.search(r'<script type="application/json" id="look">(.*?)</script>', shown, re.S)
    assert found, shown[-2000:]
    return json.loads(html.unescape(found[1]))


def contrast(text: str, behind: str) -> float:
    """The ratio of two colours' luminances, 1 to 21, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3]]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(text), luminance(behind)))
    return (light + 0.05) / (dark + 0.05)
