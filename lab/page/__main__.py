"""Writes the screenshots of lab/page: `python -m lab.page`, in a Chromium that is installed (see --help).

Each is of a run of the embedded pair with a fixed seed, so that it looks the same anywhere but for its clock.
"""
import argparse
import base64
import shutil
import sys
import tempfile
from pathlib import Path as File
from typing import NamedTuple

import specmini

HERE = File(__file__).parent
STORY = 'Last winter Tom the crow went to the forest with a basket.'
WIDTH = 1000        # pixels
MOST = 150_000      # bytes of a screenshot


class Shot(NamedTuple):
    """One screenshot: a run, where in it the page stands, and what part of the page is seen."""
    flags: str
    where: str      # JavaScript that says whether a place of the run, `at`, is the one; the first is taken
    first: str      # selectors of the first element that is seen
    last: str       # and of the last


SHOTS = {
    'sd': Shot('--temperature 1 --seed 5 --max-new 80 --method sd',
               'at.kind === "rejected" && lawsAt(at).overlap > 0.3', 'header', '#picture'),
    'ecsv': Shot('--temperature 1 --seed 5 --max-new 80 --method ecsv',
                 'at.kind === "rejected" && at.place > 0', '#text-heading', '#view'),
    'lanes': Shot('--temperature 1 --seed 5 --max-new 80 --compare sd',
                  'at.cycle === 9', '#clock-heading', '.columns')}


def open_browser(profile):
    """A headless Chromium with this empty profile; ValueError where none is installed."""
    chromium = shutil.which('chromium') or shutil.which('google-chrome')
    driver = shutil.which('chromedriver')
    if not (chromium and driver):
        raise ValueError('no browser here; expected chromium and chromedriver: apt-get install chromium '
                         'chromium-driver')
    from selenium import webdriver
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ('headless=new', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run',
                 'disable-background-networking', 'disable-component-update', 'disable-sync',
                 'disable-dev-shm-usage', 'hide-scrollbars', f'user-data-dir={profile}'):
        options.add_argument(f'--{flag}')
    options.set_capability('goog:loggingPrefs', dict(browser='ALL'))
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def visit(browser, file, width=WIDTH):
    """Opens a page from disk, this many pixels wide."""
    metrics = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
    browser.get(file.as_uri())


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
                specmini.expect(status == 0, f'{name}: the run ended with status {status}')
                visit(browser, page)
                image = taken(browser, shot)
                specmini.expect(len(image) <= MOST, f'{name}.png: {len(image)} bytes, expected at most {MOST}')
                (folder / f'{name}.png').write_bytes(image)
        finally:
            browser.quit()


def main():
    parser = argparse.ArgumentParser(prog='python -m lab.page', description=__doc__.splitlines()[0])
    parser.add_argument('--to', metavar='DIR', type=File, default=HERE, help='default: lab/page')
    args = parser.parse_args()
    try:
        screenshots(args.to)
    except (ValueError, OSError) as error:
        print('lab.page:', error, file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
