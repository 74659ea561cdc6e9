"""Figures of real, trained models: each table as one command, resumed where it was interrupted.

    make bench-real TABLE=activations [BENCH="--models smollm2-135m"]
    python bench/real.py TABLE [--models NAME ...] [--only ROW ...] [--rounds N] [--out FOLDER] [--json]
    python bench/real.py --list

Models are those of `bench/real_models.py`, in the folder ATTAR_REAL_MODELS. They are quantized files: where something
is compressed, the original is the file's values in bfloat16. Texts are those of ATTAR_TEST_DATA.

Each cell is measured by a program of its own, whose command stands below the table. A finished run is kept in
`runs.json` in --out, with commit and load, so that the same command goes on where it ended. A folder is of one machine
and one number of threads. Figures that take time are run --rounds times, all of a table in turn, and medians are shown;
others once. Ratios are of runs in one round: a peer that is named later needs more --rounds, or another --out. With
--rounds 0 what there is is printed. A cell that was not run is empty, and what cannot be run says why. Peers are
measured where their programs are named. Exit status 1 where a measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import real_models
from engines import BUSY
from reals import framework
from reals.setting import Setting
from reals.tables import tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help="see --list")
    parser.add_argument("--list", action="store_true", help="the tables, their sizes, and why cells stay empty")
    parser.add_argument("--models", nargs="+", choices=real_models.MODELS, metavar="NAME", help="default: all")
    parser.add_argument("--only", nargs="+", default=(), metavar="ROW", help="rows whose names hold one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of a program; default: as many as there are cores")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text that arithmetic is scored on")
    parser.add_argument("--samples", type=int, help="calibration sequences of a compression; default: the table's own")
    parser.add_argument("--scored", type=int, help="tokens that a compression is scored on; default: the table's own")
    parser.add_argument("--out", type=Path, default=real_models.ROOT / "build" / "real", metavar="FOLDER")
    parser.add_argument("--filled", action="store_true", help="show only rows of which something was run")
    parser.add_argument("--json", action="store_true", help="print nothing but the object that comes last otherwise")
    for name, program in (
        ("llamacpp", "PYTHON"),
        ("llama-cli", "PROGRAM"),
        ("openvino", "PYTHON"),
        ("peers", "PYTHON"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar=program, help="measured as well where it is named")
    args = parser.parse_args()
    place = real_models.folder() or real_models.DEFAULT
    names = args.models or tuple(real_models.MODELS)
    measures = args.table is not None and args.rounds > 0 and not args.list
    checked = {name: real_models.against(name, place) for name in names if measures}
    setting = Setting(
        models={name: (place / real_models.MODELS[name].file).absolute() for name in names},
        out=args.out.absolute(),
        tokens=args.tokens,
        threads=args.threads,
        wrong={name: why for name, why in checked.items() if why is not None},
        llamacpp=args.llamacpp,
        llama_cli=args.llama_cli,
        openvino=args.openvino,
        peers=args.peers,
        samples=args.samples,
        scored=args.scored,
    )
    every = tables(setting)
    if args.list or args.table is None:
        for each in every.values():
            print(f"{each.name:<12} {len(each.rows)} rows: {each.about}")
            for reason in dict.fromkeys(row.reason for row in each.rows if row.reason):
                print(f"{'':<13}empty, {reason}")
        return 0
    if args.table not in every:
        parser.error(f"there is no table {args.table}: there are {', '.join(every)}")
    table = framework.chosen(every[args.table], names, args.only)
    runs, failed = framework.Runs.open(args.out.absolute(), args.threads), dict[str, str]()
    if measures and any(each.timed for row in table.rows for each in row.measurements):
        load = os.getloadavg()[0]
        framework.progress(f"load before the run: {load:.1f}" + (": something else is running" if load > BUSY else ""))
    try:
        failed = framework.fill(table, runs, args.rounds, framework.progress)
    finally:  # what was measured is shown also where the run is broken off
        table = framework.filled(table, runs) if args.filled else table
        if not args.json:
            print(framework.shown(table, runs, failed))
        print(json.dumps(framework.as_json(table, runs, failed)), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
