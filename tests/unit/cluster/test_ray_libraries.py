"""Check of Ray Serve and Ray Data, which need not be installed."""

from __future__ import annotations

import importlib
import sys

import pytest
import ray

from eagleray.cluster.ray_libraries import explain_missing_library


def explain() -> str | None:
    return explain_missing_library("ray.util", "eagleray.data", min_ray=(2, 60), extra="data")


@pytest.mark.parametrize("version", ["2.59.1", "1.13.0", "unknown"])
def test_explain_missing_library_older_ray_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    assert explain() == (
        f"eagleray.data needs Ray 2.60 or newer, but Ray {version} is installed: pip install "
        '"ray[data]>=2.60", on every node of the cluster'
    )


@pytest.mark.parametrize("version", ["2.60.0", "2.61.0rc1", "3.0.0.dev0"])
def test_explain_missing_library_newer_ray_is_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    assert explain() is None


@pytest.mark.parametrize("module", ["ray", "ray.util"])
def test_explain_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    said = explain()
    assert said is not None
    assert said.startswith("eagleray.data needs ray.util, which cannot be imported here (")
    assert said.endswith('): pip install "ray[data]>=2.60", on every node of the cluster')


@pytest.mark.parametrize("library", ["data", "serve"])
@pytest.mark.parametrize("missing", ["ray", "ray.{}"])
def test_import_of_a_package_without_its_library_is_one_error(
    monkeypatch: pytest.MonkeyPatch, library: str, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing.format(library), None)
    monkeypatch.delitem(sys.modules, f"eagleray.{library}", raising=False)
    said = rf'^eagleray\.{library} needs ray\.{library}, .*pip install "ray\[{library}\]>=2\.\d+"'
    with pytest.raises(ImportError, match=said) as raised:
        importlib.import_module(f"eagleray.{library}")
    assert raised.value.__context__ is None
