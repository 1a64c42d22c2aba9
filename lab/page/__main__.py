"""Writes the screenshots of lab/page: `python -m lab.page`, in a Chromium that is installed.

Each is of a run of the embedded pair with a fixed seed, so that it looks the same anywhere but for its clock.
"""
import base64
import sys
import tempfile
from pathlib import Path as File
from typing import NamedTuple

import specmini
from lab.page.browser import open_browser, visit

HERE = File(__file__).parent
STORY = 'Last winter Tom the crow went to the forest with a basket.'
WIDTH = 900         # pixels


class Shot(NamedTuple):
    """One screenshot: a run, where in it the page stands, and what part of the page is seen."""
    flags: str
    where: str      # JavaScript that says whether a place of the run, `at`, is the one; the first is taken
    first: str      # selectors of the first element that is seen
    last: str       # and of the last


SHOTS = {
    'sd': Shot('--temperature 1 --seed 23 --max-new 80 --method sd',
               'at.kind === "rejected" && at.row.chance > 0.3', '#text-heading', '#picture'),
    'ecsv': Shot('--temperature 1 --seed 9 --max-new 80 --method ecsv',
                 'at.kind === "rejected" && at.place === 2',
                 '#place-heading', '#view'),
    'lanes': Shot('--temperature 1 --seed 23 --max-new 80 --compare sd',
                  'at.cycle === 9', '#clock-heading', '.columns')}


def taken(browser, shot):
    """The PNG of a shot of the page that the browser shows."""
    clip = browser.execute_script(f'''
        move(Math.max(0, events().findIndex(at => {shot.where})));
        const top = document.querySelector({shot.first!r}).getBoundingClientRect().top + scrollY;
        const end = document.querySelector({shot.last!r}).getBoundingClientRect().bottom + scrollY;
        return {{x: 0, y: top - 14, width: {WIDTH}, height: end - top + 28, scale: 1}};''')
    found = browser.execute_cdp_cmd('Page.captureScreenshot', dict(captureBeyondViewport=True, clip=clip))
    return base64.b64decode(found['data'])


def screenshots(folder):
    """Writes every shot into the folder."""
    with tempfile.TemporaryDirectory() as home:
        browser = open_browser(home)
        try:
            for name, shot in SHOTS.items():
                page = File(home) / f'{name}.html'
                status = specmini.main(['--prompt', STORY, *shot.flags.split(), '--trace', str(page)])
                specmini.require_that(status == 0, f'{name}: the run ended with status {status}')
                visit(browser, page, WIDTH)
                (folder / f'{name}.png').write_bytes(taken(browser, shot))
        finally:
            browser.quit()


if __name__ == '__main__':
    sys.exit(specmini.exit_status('lab.page', lambda: screenshots(HERE)))
