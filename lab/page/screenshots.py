"""A headless browser that opens pages, and the screenshots: `python -m lab.page.screenshots` writes them.

Each is of a run of the embedded pair with a fixed seed, so that it looks the same anywhere but for its clock.
"""
import base64
import shutil
import sys
import tempfile
from pathlib import Path as File

from lab.page import run
from model import require_that
from specmini import exit_status

HERE = File(__file__).parent
STORY = 'Last winter Tom the crow went to the forest with a basket.'
WIDTH = 900         # pixels
SHOTS = dict(       # the flags of a run, and which part of its page is seen, see `taken`
    sd=('--temperature 1 --seed 23 --max-new 80 --method sd',
        'at.kind === "rejected" && at.row.chance > 0.3', '#text-heading', '#picture'),
    ecsv=('--temperature 1 --seed 9 --max-new 80 --method ecsv',
          'at.kind === "rejected" && at.place === 2', '#place-heading', '#view'),
    lanes=('--temperature 1 --seed 23 --max-new 80 --compare sd',
           'at.cycle === 9', '#clock-heading', '.columns'))


def open_browser(profile):
    """A headless Chromium with this empty profile; BadInput where none is installed."""
    chromium = shutil.which('chromium') or shutil.which('google-chrome')
    driver = shutil.which('chromedriver')
    require_that(chromium and driver, 'no browser here: apt-get install chromium chromium-driver')
    from selenium import webdriver
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ('headless=new', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run',
                 'disable-background-networking', 'disable-component-update', 'disable-sync',
                 'disable-dev-shm-usage', 'hide-scrollbars', f'user-data-dir={profile}'):
        options.add_argument(f'--{flag}')
    options.set_capability('goog:loggingPrefs', dict(browser='ALL'))
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def visit(browser, file, width=1000):
    """Opens a page from disk, this many pixels wide."""
    metrics = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
    browser.get(file.as_uri())


def taken(browser, where, first, last):
    """The PNG of the page that the browser shows, from the first to the last element (selectors).

    where: JavaScript; the page stands at the first place of the run, `at`, for which it is true.
    """
    clip = browser.execute_script(f'''
        move(Math.max(0, events().findIndex(at => {where})));
        const top = document.querySelector({first!r}).getBoundingClientRect().top + scrollY;
        const end = document.querySelector({last!r}).getBoundingClientRect().bottom + scrollY;
        return {{x: 0, y: top - 14, width: {WIDTH}, height: end - top + 28, scale: 1}};''')
    image = browser.execute_cdp_cmd('Page.captureScreenshot', dict(captureBeyondViewport=True, clip=clip))
    return base64.b64decode(image['data'])


def screenshots(folder):
    """Writes every shot into the folder."""
    with tempfile.TemporaryDirectory() as home, open_browser(home) as browser:
        for name, (flags, *shot) in SHOTS.items():
            page = File(home) / f'{name}.html'
            run(['--prompt', STORY, *flags.split(), str(page)])
            visit(browser, page, WIDTH)
            (folder / f'{name}.png').write_bytes(taken(browser, *shot))


if __name__ == '__main__':
    sys.exit(exit_status('lab.page.screenshots', lambda: screenshots(HERE)))
