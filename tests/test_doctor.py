"""The report of `attar doctor`: what it says must be what the deciding code says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attar import doctor, env
from attar.kernels import dispatch
from attar.kernels.native import extension
from attar.version import __version__


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.examine()


def test_the_report_is_json(report: doctor.Report) -> None:
    assert json.loads(json.dumps(report)) == report


def test_versions(report: doctor.Report) -> None:
    assert report["versions"]["attar"] == __version__
    assert report["versions"]["torch"] == torch.__version__


def test_a_package_that_is_absent_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package-here",))
    assert doctor.examine()["versions"]["no-such-package-here"] is None


def test_cpu_and_threads(report: doctor.Report) -> None:
    assert report["cpu"]["features"] == extension.features()
    assert report["cpu"]["level"] == extension.cpu_level()
    assert report["threads"]["torch"] == torch.get_num_threads()
    assert report["devices"][0]["name"] == "cpu"


def test_every_op_has_a_backend_and_every_other_candidate_a_reason(report: doctor.Report) -> None:
    for chosen in report["kernels"].values():
        assert set(chosen) == set(dispatch.OPS)
        for choice in chosen.values():
            reasons = {c["backend"]: c["reason"] for c in choice["candidates"]}
            assert reasons[choice["backend"]] is None
            before = list(reasons)[: list(reasons).index(choice["backend"])]
            assert all(reasons[backend] for backend in before)
    assert report["kernels"]["cpu float32"]["quantize_rows_int8"]["backend"] == "native"


def test_forcing_the_reference_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "get", lambda: env.Env(kernels="ref"))
    report = doctor.examine()
    choice = report["kernels"]["cpu float32"]["quantize_rows_int8"]
    assert choice["backend"] == "ref"
    assert "ATTAR_KERNELS=ref" in choice["candidates"][0]["reason"]
    assert "ATTAR_KERNELS" in doctor.to_text(report)


def test_the_page_for_people_names_every_op_and_version(report: doctor.Report) -> None:
    page = doctor.to_text(report)
    for word in (*dispatch.OPS, *report["versions"], report["cpu"]["architecture"], "OpenMP runtimes loaded"):
        assert word in page


MAPS = """\
7f00 r-xp 00000000 08:01 11 /venv/lib/python3.11/site-packages/torch/lib/libgomp.so.1
7f10 r--p 00001000 08:01 11 /venv/lib/python3.11/site-packages/torch/lib/libgomp.so.1
7f20 r-xp 00000000 08:01 12 /usr/lib/libgompertz.so
7f30 rw-p 00000000 00:00 0
"""


def test_openmp_runtimes_are_counted_by_file(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert doctor.openmp_runtimes(maps) == 1
    maps.write_text(MAPS + "7f40 r-xp 00000000 08:01 13 /opt/libs/libgomp-a34b3233.so.1.0.0\n")
    assert doctor.openmp_runtimes(maps) == 2
    maps.write_text(MAPS + "7f40 r-xp 00000000 08:01 13 /opt/my files/libiomp5.so\n")
    assert doctor.openmp_runtimes(maps) == 2
    assert doctor.openmp_runtimes(tmp_path / "absent") is None
