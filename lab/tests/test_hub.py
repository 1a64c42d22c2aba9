"""Names of repositories in place of folders: fetched from a hub on the loopback, then read from the cache."""
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lab.tests.helpers import subprogram, tiny

SHA = 'a' * 40
RUNS = '''
import json, sys, specmini
for target in json.loads(sys.argv[1]):
    flags = '--draft lookup --prompt hello --max-new 4 --json'.split()
    print('status', specmini.main(['--target', target, *flags]))
'''


@pytest.fixture
def hub(tmp_path):
    """The address of a hub with three repositories: of weights, of a pickle alone, and a gated one."""
    pages = {}
    for name, weights in (('us/whole', 'model.safetensors'), ('us/pickle', 'pytorch_model.bin')):
        folder = tiny(tmp_path / name)
        (folder / 'model.safetensors').rename(folder / weights)
        files = [file.name for file in folder.iterdir()] + ['original/params.json']
        tree = [dict(type='file', path=file, size=1, oid=SHA) for file in files]
        pages[f'/api/models/{name}/revision/main'] = json.dumps(dict(id=name, sha=SHA)).encode()
        pages[f'/api/models/{name}/tree/{SHA}'] = json.dumps(tree).encode()
        pages |= {f'/{name}/resolve/{SHA}/{file.name}': file.read_bytes() for file in folder.iterdir()}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self):
            body = pages.get(self.path.split('?')[0], b'')
            self.send_response(200 if body else 403 if 'gated' in self.path else 404)
            self.send_header('ETag', f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header('X-Repo-Commit', SHA)
            if not body:
                self.send_header('X-Error-Code', 'GatedRepo' if 'gated' in self.path else 'RepoNotFound')
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            if self.command == 'GET':
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass
    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


@pytest.mark.slow
def test_repositories(hub, tmp_path):
    """Fetched once, without the files of subfolders; a line each for what cannot be had; then offline."""
    def runs(*names, **settings):
        status, out, err = subprogram('-c', RUNS, json.dumps(names), HF_HOME=str(tmp_path), **settings)
        assert status == 0 and 'Traceback' not in err, err
        told = [line for line in err.splitlines() if line.startswith('specmini: ')]
        return re.findall(r'^status (\d)', out, re.M), told
    names = 'us/pickle', 'us/gated', 'us/absent', 'no/such/folder'
    statuses, told = runs('us/whole', *names, HF_ENDPOINT=hub)
    assert statuses == ['0', '2', '2', '2', '2'] and 'convert .bin' in told[0]
    for line, name in zip(told[1:], names[1:], strict=True):
        assert f'{name}: no such folder, and as a repository of the hub: ' in line
    offline = dict(HF_ENDPOINT='http://127.0.0.1:9', HF_HUB_OFFLINE='1')
    assert runs('us/whole', **offline) == (['0'], [])
    statuses, (line,) = runs('us/other', **offline)
    assert statuses == ['2'] and 'us/other: no such folder' in line
