from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gspo_agent.sandbox.inside import linux

PACKAGE = Path(linux.__file__).parents[1]
SHARED = """
import re, sys
sys.path.insert(0, sys.argv[1])
from inside import linux

def own_pages():
    with open("/proc/self/smaps") as table:
        mappings = re.split(r"(?m)^(?=[0-9a-f]+-)", table.read())
    return [re.search(r"Anonymous: +(\\d+)", m)[1] for m in mappings if re.match(r".* r-xp .*/libc[.]", m)]

print(own_pages())
linux.share_text()
print(own_pages())
"""


def test_machine_code_has_a_page_of_its_own_so_that_forks_have_all_of_it() -> None:
    command = [sys.executable, "-I", "-S", "-c", SHARED, str(PACKAGE)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "['0']\n['4']\n"
