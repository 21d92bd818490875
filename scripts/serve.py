"""Starts the fleet on this machine and keeps it until ctrl-C: `python -m scripts.serve [CONFIG]`.

ray start --head --block ─► serve run CONFIG ─► GET /health/ready is 200 ─► ready line ─► signal ─► end everything
 (own temp folder, own token)
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.config.admin import AdminConfig
from app.config.files import IMPORT_PATH
from app.config.keys import ApiKeysConfig
from scripts.fleet import Fleet, ServeError, Stop, Target, is_free


def read_target(config: Path) -> Target:
    """Take host, port, route prefix and model name from a Serve config; the application validates the rest."""
    try:
        content: dict[str, Any] = yaml.safe_load(config.read_text())
        http = content.get("http_options") or {}
        application = content["applications"][0]
        model = ((application.get("args") or {}).get("model_loading_config") or {}).get("model_id", "MODEL")
        prefix = (application.get("route_prefix") or "/").rstrip("/")
        host = http.get("host", "127.0.0.1")
        args, port = application.get("args") or {}, int(http.get("port", 8000))
        refuse_open_host(config, host, args.get("api_keys") or {})
        ours = application.get("import_path") == IMPORT_PATH
        admin = admin_of(config, args.get("admin") or {}, port) if ours else AdminConfig(enabled=False)
        return Target(config.resolve(), host, port, prefix, model, admin)
    except OSError as error:
        raise ServeError(f"cannot read {config}: {error.strerror}") from error
    except (yaml.YAMLError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ServeError(f"{config} is not a Serve config (http_options, applications): {error!r}") from error


def refuse_open_host(config: Path, host: str | None, api_keys: dict[str, Any]) -> None:
    """Refuse to serve other machines without API keys, unless the file says that this is meant."""
    try:
        section = ApiKeysConfig.model_validate(api_keys)
    except ValidationError:
        return  # the application names the field at fault
    if (problem := section.public_problem(host)) is not None:
        raise ServeError(f"{config.name}: {problem}")


def admin_of(config: Path, section: dict[str, Any], api_port: int) -> AdminConfig:
    """The status page's settings; the application names what is wrong with them."""
    try:
        admin = AdminConfig.model_validate(section)
    except ValidationError:
        return AdminConfig(enabled=False)
    if (problem := admin.port_problem(api_port)) is not None:
        raise ServeError(f"{config.name}: {problem}")
    return admin


def claim(target: Target) -> socket.socket:
    """Refuse to start where something listens, or is about to; keep the result open for as long as the fleet runs."""
    guard = socket.socket(socket.AF_UNIX)
    try:
        guard.bind(f"\0tidegate-{target.port}")  # abstract: visible to others at once, gone with this process
    except OSError:
        raise ServeError(
            f"another `make serve` on this machine already has port {target.port}: end it with ctrl-C, "
            f"or set another http_options.port in {target.config.name}"
        ) from None
    if not is_free(target.host, target.port):
        guard.close()
        raise ServeError(
            f"{target.host}:{target.port} is in use by another program: end it, "
            f"or set another http_options.port in {target.config.name}"
        )
    if target.admin.enabled and not is_free(target.admin.host, target.admin.port):
        guard.close()
        raise ServeError(
            f"{target.admin.host}:{target.admin.port}, the port of the status page, is in use: end what has it, "
            f"or set another admin.port, or admin.enabled: false, in {target.config.name}"
        )
    return guard


def try_line(target: Target) -> str:
    """A curl command for the fleet."""
    body = f'{{"model": "{target.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {target.url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def admin_line(fleet: Fleet) -> str:
    """Where the status page is, and what its actions ask for."""
    admin = fleet.target.admin
    own = "that of admin.token_file or admin.token_env" if admin.token_file or admin.token_env else fleet.admin_token
    return f"Status page: http://{admin.host}:{admin.port}/status, the token for its actions is {own}\n"


def on_signal(number: int, frame: object) -> None:
    """Leave `watch` or a start in progress."""
    raise Stop


def main() -> int:
    """Run the fleet of one config file; exit status 0 after ctrl-C or SIGTERM, 1 after a failure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=Path("serve_config.yaml"))
    try:
        target = read_target(parser.parse_args().config)
        guard = claim(target)
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    with guard:
        return run(Fleet(target))


def run(fleet: Fleet) -> int:
    """Start `fleet`, say when it is ready, wait for a signal, end it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    failure: ServeError | None = None
    try:
        fleet.start()
        exports = shlex.join(f"{name}={value}" for name, value in fleet.client_env.items())
        fleet.say(f"ready on {fleet.target.url} (logs in {fleet.folder}, ctrl-C ends it). Try:")
        print(f"\n{try_line(fleet.target)}\n\nFor `serve status` and Python handles: export {exports}\n", flush=True)
        if fleet.target.admin.enabled:
            print(admin_line(fleet), flush=True)
        fleet.watch()
    except Stop:
        fleet.say("ending the fleet; ctrl-C again kills it")
    except ServeError as error:
        failure = error
        print(fleet.log_tail(), file=sys.stderr)
    try:
        fleet.stop()
    except ServeError as error:
        failure = failure or error
    if failure:
        print(f"serve: {failure}\nserve: all logs are in {fleet.folder}", file=sys.stderr)
        return 1
    shutil.rmtree(fleet.folder, ignore_errors=True)
    fleet.say("ended, no process is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
