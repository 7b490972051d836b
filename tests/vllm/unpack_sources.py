"""Takes the Python sources out of a wheel: `python unpack_sources.py WHEEL DIR`.

vLLM 0.33 is built for CUDA only. Its managers are plain Python, and are imported for tests without
what was compiled, which is most of the wheel.
"""

import sys
import zipfile


def main() -> None:
    wheel, directory = sys.argv[1:3]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".json", ".txt", "METADATA")):
                archive.extract(name, directory)


if __name__ == "__main__":
    main()
