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


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
    """The address of a hub with three repositories: of weights, of a pickle alone, and a gated one."""
    home = tmp_path_factory.mktemp('hub')
    whole, pickle = tiny(home / 'whole'), tiny(home / 'pickle')
    (pickle / 'model.safetensors').rename(pickle / 'pytorch_model.bin')
    (pickle / '.gitattributes').write_text('')
    (whole / 'original').mkdir()
    (whole / 'original/large.safetensors').write_bytes(b'not to be fetched')
    folders = {'us/whole': whole, 'us/pickle': pickle}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self):
            name, rest = re.fullmatch(r'/(?:api/models/)?(\w+/\w+)/(.*)', self.path).groups()
            if name not in folders:
                gated = {'X-Error-Code': 'GatedRepo' if 'gated' in name else 'RepoNotFound'}
                return self.answer(403 if 'gated' in name else 404, b'', gated)
            files = sorted(folders[name].rglob('*.*'))
            names = [str(file.relative_to(folders[name])) for file in files]
            if rest.startswith('revision/'):
                found = dict(id=name, sha=SHA, siblings=[dict(rfilename=file) for file in names])
                return self.answer(200, json.dumps(found).encode())
            if rest.startswith('tree/'):
                found = [dict(type='file', path=file, size=1, oid=SHA) for file in names]
                return self.answer(200, json.dumps(found).encode())
            body = (folders[name] / rest.split('/', 2)[2]).read_bytes()         # resolve/SHA/FILE
            assert b'not to be' not in body
            etag = hashlib.sha256(body).hexdigest()
            return self.answer(200, body, {'ETag': f'"{etag}"', 'X-Repo-Commit': SHA})

        do_HEAD = do_GET

        def answer(self, status, body, headers=()):
            self.send_response(status)
            for key, value in dict(headers).items():
                self.send_header(key, value)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            if self.command == 'GET':
                self.wfile.write(body)

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
    statuses, told = runs('us/whole', 'us/pickle', 'us/gated', 'us/absent', 'no/such/folder', HF_ENDPOINT=hub)
    assert statuses == ['0', '2', '2', '2', '2']
    names = 'us--pickle', 'us/gated', 'us/absent', 'no/such/folder'
    words = 'convert .bin', 'HF_TOKEN', 'nor is there a repository', 'no such folder'
    for line, name, named in zip(told, names, words):
        assert name in line and named in line
    offline = dict(HF_ENDPOINT='http://127.0.0.1:9', HF_HUB_OFFLINE='1')
    assert runs('us/whole', **offline) == (['0'], [])
    statuses, (line,) = runs('us/other', **offline)
    assert statuses == ['2'] and 'us/other: no such folder; as a repository it is not in the cache' in line
