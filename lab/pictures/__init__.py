
import sys

try:
    import matplotlib                   # noqa: F401
    import scipy                        # noqa: F401, for lab.judge
except ImportError as missing:
    sys.exit(f'lab.pictures: {missing.name} is not installed: '
             'pip install -r requirements-lab.txt -r requirements-test.txt')
