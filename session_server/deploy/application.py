"""Make the application of Ray Serve: for `cluster up`, and for a configuration file of Ray's own.

Such a file, as KubeRay's, names `session_server.deploy.application:build` as `import_path`. Its
`args` are `replicas`, `replica_cpus` and `replica_gpus`, as the flags of `cluster up`. Settings
come from the file and the variables that `serve` reads.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any, Final

from pydantic import SecretStr
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from session_server import serving, sources, wiring
from session_server.config import Settings
from session_server.deploy.options import (
    ReplicaOptions,
    deployment_options,
    replica_count,
    replica_settings,
)
from session_server.deploy.replica import Replica

_ARGUMENTS: Final = {"replicas": "2", "replica_cpus": "1", "replica_gpus": "0"}


def make_application(
    settings: Settings, environment_key: str | None, options: ReplicaOptions
) -> Any:
    """Return the application that runs these replicas. Raises ValueError: see
    `replica_settings`."""
    told = deployment_options(settings, options)
    told["request_router_config"] = RequestRouterConfig(**told["request_router_config"])
    if "autoscaling_config" in told:
        told["autoscaling_config"] = AutoscalingConfig(**told["autoscaling_config"])
    key = None if environment_key is None else SecretStr(environment_key)
    return serve.deployment(**told)(Replica).bind(replica_settings(settings, options), key)


def build(args: Mapping[str, Any]) -> Any:
    """Return the application that a file of Ray Serve describes.

    Raises:
        ValueError: an argument or a setting cannot be used; the message names it.
    """
    unknown = args.keys() - _ARGUMENTS.keys()
    if unknown:
        raise ValueError(f"args: there is no {unknown.pop()}; there are {', '.join(_ARGUMENTS)}")
    given = {name: str(args.get(name, default)) for name, default in _ARGUMENTS.items()}
    try:
        count = replica_count(given["replicas"])
    except ArgumentTypeError as error:
        raise ValueError(f"args: replicas: {error}") from None
    options = ReplicaOptions(count, float(given["replica_cpus"]), float(given["replica_gpus"]))
    settings = sources.read_sources({}, environment=os.environ, file=None).settings
    key = serving.take_key()
    wiring.make_entrance(settings.http, key)
    return make_application(settings, key, options)
