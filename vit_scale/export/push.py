"""Uploading a folder to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vit_scale.errors import UserError


def check_login(repo: str) -> Any:
    """huggingface_hub's API, if there is a login; a `UserError` otherwise, before anything is made."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"--push {repo}: not the name of a repository, such as user/model ({error})") from error
    api = HfApi()
    try:
        api.whoami()
    except Exception as error:  # noqa: BLE001 -- no token, a wrong one, no network: nothing can be uploaded
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--push {repo}: not logged in to the hub, or it cannot be reached ({reason}).\n"
            "Run `hf auth login` first; nothing was uploaded."
        ) from error
    return api


def push_folder(api: Any, folder: Path, repo: str, *, private: bool) -> str:
    """Upload `folder` to the model repository `repo`, which is made if need be; returns its address."""
    try:
        address = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload a model trained with vit_scale")
    except Exception as error:  # noqa: BLE001 -- the hub's refusals are of many classes, and all are to be told
        raise UserError(f"--push {repo}: the hub refused: {str(error).strip().splitlines()[0]}") from error
    return str(address)
