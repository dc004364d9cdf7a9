"""Upload a directory to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vit_scale.errors import UserError


def check_login(repo: str) -> Any:
    """Return the huggingface_hub API if logged in; raises `UserError` otherwise, before anything is written."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"--push {repo}: invalid repository name, expected e.g. user/model ({error})") from error
    api = HfApi()
    try:
        api.whoami()
    except Exception as error:  # noqa: BLE001 -- missing or invalid token, no network: nothing can be uploaded
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--push {repo}: not logged in to the Hub, or the Hub is unreachable ({reason}).\n"
            "Run `hf auth login` first; nothing was uploaded."
        ) from error
    return api


def push_folder(api: Any, folder: Path, repo: str, *, private: bool) -> str:
    """Upload `folder` to the model repository `repo`, created if necessary; returns its URL."""
    try:
        url = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload a model trained with vit_scale")
    except Exception as error:  # noqa: BLE001 -- the Hub raises many exception types; report all of them
        raise UserError(f"--push {repo}: upload to the Hub failed: {str(error).strip().splitlines()[0]}") from error
    return str(url)
