"""Plants the bugs of this directory in a copy of the tree, one at a time, and simulates each.

Run it by `make mutations`. A bug is a patch, which must apply without fuzz: one that does not is
an error, so that no patch rots unseen. Names of patches may be given to run only those.

Exit code 0: the simulation finds every bug within SEEDS seeds, and none without them. 1: it does
not. 2: a patch does not apply, or the tree does not build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[4]
WORK = ROOT / "target" / "mutations"
TREE = WORK / "tree"
SEEDS = 1000
# Far more than the seeds take: a bug that makes them run for ever is found too.
TIMEOUT_S = 300


def tool(name: str) -> str:
    """The path of a program; ends the run if it is not there."""
    path = shutil.which(name)
    if path is None:
        print(f"{name} is not installed", file=sys.stderr)
        sys.exit(2)
    return path


def copy_tree() -> None:
    """Copies what git knows and sees; files that did not change keep their times."""
    listed = subprocess.run(
        [tool("git"), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    wanted = {Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for old in [path for path in TREE.rglob("*") if path.is_file()]:
        if old.relative_to(TREE) not in wanted:
            old.unlink()
    for name in wanted:
        source, copy = ROOT / name, TREE / name
        if not copy.exists() or source.read_bytes() != copy.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def apply(patch: Path, *flags: str) -> str | None:
    """Applies a patch to the copy; what git says if it does not apply."""
    # The copy is a directory like any other, not part of the repository around it.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(WORK)}
    done = subprocess.run(
        [tool("git"), "apply", *flags, str(patch)],
        cwd=TREE,
        env=outside,
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else None


def cargo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs cargo in the copy: fast to build, without the assertions of debug builds."""
    settings = {
        **os.environ,
        "CARGO_TARGET_DIR": str(WORK / "target"),
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
        "CARGO_PROFILE_RELEASE_DEBUG": "false",
        "FIRST": "0",
        "SEEDS": str(SEEDS),
    }
    test = ["test", "--quiet", "--release", "--locked", "-p", "kvtier-core", "--test", "simulation"]
    return subprocess.run(
        [tool("cargo"), *test, *arguments],
        cwd=TREE,
        env=settings,
        capture_output=True,
        text=True,
        timeout=None if "--no-run" in arguments else TIMEOUT_S,
    )


def simulate() -> str | None:
    """How the simulation finds that something is wrong; None if it does not."""
    built = cargo("--no-run")
    if built.returncode:
        print(built.stderr, file=sys.stderr)
        sys.exit(2)
    try:
        done = cargo("--", "--exact", "every_seed_keeps_every_invariant")
    except subprocess.TimeoutExpired:
        return "a seed does not end"
    if done.returncode == 0:
        return None
    said = re.search(r"^(seed \d+: .{0,90})", done.stdout + done.stderr, re.MULTILINE)
    return said[1] if said else "the process died"


def main() -> int:
    """Runs all patches, or those named."""
    names = sys.argv[1:]
    patches = sorted(path for path in HERE.glob("*.patch") if not names or path.stem in names)
    copy_tree()
    rotten = [(patch.stem, error) for patch in patches if (error := apply(patch, "--check"))]
    for name, error in rotten:
        print(f"{name}: does not apply, renew it\n{error}", file=sys.stderr)
    if rotten or not patches:
        return 2
    sound = simulate()
    print(f"{'no bug':<36} {sound or 'nothing found, as it should be'}", flush=True)
    found = 0
    for patch in patches:
        apply(patch)
        how = simulate()
        apply(patch, "--reverse")
        print(f"{patch.stem:<36} {how or f'NOT FOUND in {SEEDS} seeds'}", flush=True)
        found += how is not None
    print(f"{found} of {len(patches)} bugs found")
    return 0 if sound is None and found == len(patches) else 1


if __name__ == "__main__":
    sys.exit(main())
