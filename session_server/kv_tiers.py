"""Compose what keeps KV outside of the pools: its sizes, its directory and what copies it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from cache.spec import CacheSpec, LayerKind
from session_server.config import CacheOptions, EngineSettings, Settings
from session_server.core.kv_place import KV_DIRECTORY
from session_server.core.tier_orders import TierCarrier
from session_server.engine.config import TierPolicy
from session_server.engine_host.tier_threads import NoTiers
from session_server.models.config import DTypeName, KvDTypeName, ModelConfig
from session_server.models.layers.block_weight import BLOCK
from session_server.runner.capacity import free_host_bytes
from session_server.runner.kv_carrier import KvCarrier
from session_server.runner.kv_directory import remove_left
from session_server.runner.loader import LoadedRunner
from session_server.runner.native import WeightFormat
from session_server.runner.segment_files import SegmentFiles
from session_server.runner.segment_format import Layout, PoolLayout
from session_server.runner.shared_files import SharedFiles

_FREE_DIVISOR: Final = 8
"""Part of the free host memory that copies of KV take at most."""

_STAGING_BYTES: Final = 256 << 20
"""Host memory that what is written to disk passes through, where none is given."""

_LOG: Final = logging.getLogger("session_server.engine")


@dataclass(frozen=True, slots=True)
class KvTiers:
    """Hold the policy of the tiers, and what carries out their orders."""

    policy: TierPolicy
    carrier: TierCarrier


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """Say what decides the bytes of a page beside its shape. KV of another identity is never used.

    Everything here says what is computed, and nothing where: not the machine, nor its free memory,
    nor which kernels or how many threads.

    Attributes:
        fingerprint: `CheckpointFiles.digest` of the model, and of a draft model.
        models: what was read from their configurations: rotary embeddings and their scaling,
            windows, kinds of layers, groups of inputs that share a scale.
        spec: what is stored of a position, and in which pages.
        weights: how linears are computed with.
        dtype: that of the computation.
        kv_dtype: that of K and V.
        codes_per_scale: of weights that are codes.
    """

    fingerprint: str
    models: tuple[ModelConfig, ...]
    spec: CacheSpec
    weights: WeightFormat
    dtype: DTypeName
    kv_dtype: KvDTypeName
    codes_per_scale: int = BLOCK


def keeps_files(settings: Settings) -> bool:
    """Return whether KV goes to disk, so that it meets whatever the next server has loaded."""
    has_place = isinstance(settings.sessions.store, Path) or _shared_place(settings) is not None
    return settings.cache.disk_kv_bytes > 0 and has_place


def _shared_place(settings: Settings) -> tuple[Path, bytes] | None:
    """Return the directory that servers of one store share, and the key of its files."""
    directory = getattr(settings.cache.disk_kv_bytes, "directory", None)
    key = settings.kv_key if isinstance(settings, EngineSettings) else ""
    return (directory, bytes.fromhex(key)) if directory is not None and key else None


def check_tiers(settings: Settings) -> None:
    """Refuse tiers that were asked for and cannot be had, before anything is loaded.

    Raises:
        ValueError: KV of several ranks would be copied.
    """
    num_ranks, cache = settings.model.tensor_parallel_size, settings.cache
    # A size that is the default was hardly asked for; it has no effect then.
    is_default = cache.host_kv_bytes in (0, CacheOptions().host_kv_bytes)
    if num_ranks > 1 and (cache.disk_kv_bytes or not is_default):
        flag = "--disk-kv-bytes" if cache.disk_kv_bytes else "--host-kv-bytes"
        raise ValueError(
            f"--tensor-parallel-size {num_ranks}: KV of several ranks is not copied out of the "
            f"pools; leave out {flag}"
        )


def make_tiers(settings: Settings, loaded: LoadedRunner, fingerprint: str) -> KvTiers:
    """Return the tiers that the settings ask for: files only in the store that they name.

    Raises:
        ValueError: the directory of files cannot be used.
    """
    cache, store = settings.cache, settings.sessions.store
    disk_bytes = int(cache.disk_kv_bytes) if keeps_files(settings) else 0
    place = _shared_place(settings)
    if cache.disk_kv_bytes and not disk_bytes:
        _LOG.warning(
            "--disk-kv-bytes has no effect: its files lie in a --store that is a directory, or in "
            "DIR of SIZE:DIR beside any --store"
        )
    if isinstance(store, Path) and not (disk_bytes and place is None):
        left = store / KV_DIRECTORY
        threading.Thread(target=_remove_left, args=(left,), name="kv-removal", daemon=True).start()
    host_bytes = max(cache.host_kv_bytes, min(disk_bytes, _STAGING_BYTES))
    host_bytes = min(host_bytes, free_host_bytes() // _FREE_DIVISOR)
    if settings.model.tensor_parallel_size > 1 and host_bytes:
        _LOG.info("KV that leaves the pools is computed again: --tensor-parallel-size")
        host_bytes = 0  # every rank would have to make, keep and read its own copies
    if host_bytes == 0:
        return KvTiers(TierPolicy(), NoTiers())
    files = None
    if disk_bytes:
        files = _open_files(settings, layout_of(loaded, fingerprint))
    tensors = loaded.runner.paged_tensors()
    carrier = KvCarrier(tensors, files, is_pinned=loaded.device != "cpu")
    _LOG.info("kv host_mib=%.0f disk_mib=%.0f", host_bytes / 2**20, disk_bytes / 2**20)
    policy = TierPolicy(
        host_bytes,
        disk_bytes,
        page_bytes=carrier.page_bytes,
        drain_s=settings.http.drain_s,
        is_shared=isinstance(files, SharedFiles),
    )
    return KvTiers(policy, carrier)


def _remove_left(directory: Path) -> None:
    """Remove the files that servers with a disk for KV have left: this one does not know of them
    when it forgets the sessions that they are of."""
    try:
        if num_removed := remove_left(directory):
            line = "removed %d files of KV from %s: there is no --disk-kv-bytes"
            _LOG.info(line, num_removed, directory)
    except OSError as error:
        _LOG.warning("files of KV cannot be removed from %s: %s", directory, error)


def _open_files(settings: Settings, layout: Layout) -> SegmentFiles:
    shared, store = _shared_place(settings), settings.sessions.store
    directory = store / KV_DIRECTORY if isinstance(store, Path) else Path()
    try:
        if shared is None:
            return SegmentFiles(directory, layout)
        directory, key = shared
        return SharedFiles(directory, replace(layout, key=key), int(settings.cache.disk_kv_bytes))
    except OSError as error:
        raise ValueError(f"--disk-kv-bytes: {directory} cannot be used: {error}") from error


def layout_of(loaded: LoadedRunner, fingerprint: str) -> Layout:
    """Return what the files of a runner's KV must agree on. `fingerprint`: see `KvIdentity`."""
    kinds = {group.pool: group.kind for group in loaded.spec.groups}
    pools = {}
    for pool, tensors in loaded.runner.paged_tensors().items():
        axis = tensors[0].page_axis
        assert all(tensor.page_axis == axis for tensor in tensors), "one axis per pool"
        shapes = tuple(tensor.shape_of(0) for tensor in tensors)
        is_whole = kinds[pool] in (LayerKind.FULL, LayerKind.LATENT)
        pools[pool] = PoolLayout(shapes, axis, is_whole)
    identity = KvIdentity(
        fingerprint=fingerprint,
        models=tuple(filter(None, (loaded.config, loaded.draft_config))),
        spec=loaded.spec,
        weights=loaded.weights,
        dtype=loaded.dtype,
        kv_dtype=loaded.kv_dtype,
    )
    return Layout(loaded.spec.page_size, pools, msgspec.json.encode(identity).decode())
