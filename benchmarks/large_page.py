"""How fast a large page opens and moves in Chromium, beside a small one.

    python benchmarks/large_page.py [--ranks 64] [--rounds 5]

Pages of made-up runs of 128 layers in which every number differs, one of two ranks and one of ``--ranks``,
are opened in turns. Printed are medians: until the page can be read (first contentful paint), until every
chart is drawn and every table sorts, until the last task of 50 ms or more has ended as the browser's own
``PerformanceObserver`` sees it, and how long the timeline takes to draw a view while it is moved and
zoomed over the lanes of four ranks, and over all ranks in a line each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.chromium import Page, find_chromium
from support.large_run import large_run

from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions

_T = "timelines.get('timeline')"

_READABLE = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"

_WATCH = """
window.__drawn = null;
window.__busy = 0;
new PerformanceObserver(list => list.getEntries().forEach(task => {
  window.__busy = Math.max(window.__busy, task.startTime + task.duration);
})).observe({type: "longtask", buffered: true});
const look = () => {
  if (typeof ready === "undefined") { setTimeout(look, 5); return; }
  ready.then(() => Promise.all(work)).then(() => { window.__drawn = performance.now(); });
};
look();
"""

_MOVES = """
(async () => {
  const t = timelines.get('timeline'), took = [];
  t.choose(%r);
  for (let i = 0; i < 40; i += 1) {
    const before = performance.now();
    if (i %% 4 === 3) t.zoom(i < 20 ? 0.7 : 1.4); else t.pan(0.1);
    await t.drawn;
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    took.push(performance.now() - before);
  }
  return took;
})()
"""


def measure(page: Page, file: Path) -> dict[str, float]:
    """Open a page; return milliseconds until it can be read, until all is drawn, and of a move."""
    page.open(file)
    found = {"readable": page.evaluate(_READABLE), "drawn": page.evaluate("window.__drawn")}
    found["long tasks over"] = page.evaluate("window.__busy")
    for what, chosen in (("move, four ranks", "most"), ("move, all ranks", "all")):
        found[what] = statistics.median(page.evaluate(_MOVES % chosen))
    return found


def main() -> None:
    """Measure both pages in turns and print the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    browser = find_chromium()
    if browser is None:
        sys.exit("no Chromium is installed")
    with tempfile.TemporaryDirectory() as folder, Page(browser) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
        files = {}
        for ranks in (2, chosen.ranks):
            files[ranks] = Path(folder) / f"{ranks}.html"
            text = RENDERERS["html"].render(build(large_run(ranks)), RenderOptions(source="runs/large"))
            files[ranks].write_text(str(text), encoding="utf-8")
        rounds = [{ranks: measure(page, file) for ranks, file in files.items()} for _ in range(chosen.rounds)]
        sizes = {ranks: file.stat().st_size for ranks, file in files.items()}
    print(f"{'milliseconds':20}" + "".join(f"{f'{ranks} ranks':>12}" for ranks in files) + f"{'ratio':>8}")
    for what in rounds[0][2]:
        small, large = (statistics.median(one[ranks][what] for one in rounds) for ranks in files)
        print(f"{what:20}{small:12.0f}{large:12.0f}{large / small:8.2f}")
    small, large = sizes.values()
    print(f"{'MB':20}{small / 1e6:12.2f}{large / 1e6:12.2f}{large / small:8.2f}")


if __name__ == "__main__":
    main()
