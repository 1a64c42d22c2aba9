"""A headless browser that opens pages from disk, for screenshots and for tests."""
import shutil


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


def visit(browser, file, width=1000):
    """Opens a page from disk, this many pixels wide."""
    metrics = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
    browser.get(file.as_uri())
