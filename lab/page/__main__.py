import sys

from lab.page import main

sys.exit(main())
