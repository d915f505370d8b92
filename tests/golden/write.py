"""Write the golden numbers of the code as it is: `python tests/golden/write.py`, after raising NUMERICS_VERSION."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.compute import FILE, compute, moved, read


def main() -> None:
    made = compute()
    if FILE.exists():
        before = read()
        same_version = before["numerics_version"] == made["numerics_version"]
        if same_version and (lines := moved(before["numbers"], made["numbers"])):
            sys.exit(
                f"{len(lines)} numbers moved ({lines[0]}); raise NUMERICS_VERSION in comparison/numerics.py first."
            )
    FILE.write_text(json.dumps(made, indent=0) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {sum(map(len, made['numbers'].values()))} numbers of version {made['numerics_version']}")


if __name__ == "__main__":
    main()
