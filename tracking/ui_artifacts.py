"""Read-only access to artifacts for the server of `sweep ui`, limited to one directory.

A tracking store may name any path as a run's artifacts, and another user may create symbolic links
in a shared directory. So each path is opened folder by folder from that directory, and a link on
the path is an error. What must not live here: the server, and access control.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException

from tracking.mlflow_compat import (
    DOWNLOAD_METHOD,
    PERMISSION_DENIED,
    RESOURCE_DOES_NOT_EXIST,
    ArtifactRepository,
    local_file_uri_to_path,
)


def below(root: Path) -> type[Artifacts]:
    """Return a class that reads only artifacts below a directory."""
    read = {DOWNLOAD_METHOD: Artifacts.download_to}
    return type("ArtifactsBelow", (Artifacts,), {"_root": root, **read})


class Artifacts(ArtifactRepository):
    """The artifacts of one run or model below `_root`."""

    _root: Path

    def __init__(
        self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
    ) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        place = urlsplit(artifact_uri)
        if place.scheme == "mlflow-artifacts":  # an ordinary MLflow server recorded the run
            folder = self._root.joinpath(*PurePosixPath(place.path).parts[1:])
        else:
            folder = Path(local_file_uri_to_path(artifact_uri))  # type: ignore[no-untyped-call]
        self._folder = self._below(folder)

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """Return the files and folders in a folder; an empty list if it does not exist."""
        found = []
        try:
            with self._opened(path or "", os.O_DIRECTORY) as folder:
                for name in sorted(os.listdir(folder)):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    is_folder = stat.S_ISDIR(status.st_mode)
                    if is_folder or stat.S_ISREG(status.st_mode):
                        where = str(PurePosixPath(path or "") / name)
                        found.append(
                            FileInfo(where, is_folder, None if is_folder else status.st_size)
                        )
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return found

    def download_to(self, remote_file_path: str, local_path: str) -> None:
        """Copy one artifact, a regular file."""
        with self._opened(remote_file_path, os.O_NONBLOCK) as file:  # never wait for a FIFO
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _error(f"{remote_file_path} is no regular file", PERMISSION_DENIED)
            with open(file, "rb", closefd=False) as source, open(local_path, "wb") as copy:
                shutil.copyfileobj(source, copy)

    def log_artifact(self, *_: object) -> None:
        """Refuse to write."""
        raise _error("this server only reads artifacts", PERMISSION_DENIED)

    log_artifacts = log_artifact

    def _below(self, folder: Path) -> tuple[str, ...]:
        """Return the parts of a folder's path below the root, also if links lead to the root."""
        if ".." not in folder.parts and folder.is_absolute():
            for parent in (folder, *folder.parents):
                if self._root.exists() and parent.exists() and parent.samefile(self._root):
                    return folder.relative_to(parent).parts
        raise _error(
            f"{self.artifact_uri} is not below {self._root}, whose artifacts this server shows; "
            "start sweep ui with the --root that the run belongs to",
            PERMISSION_DENIED,
        )

    @contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        """Open a file or folder of the run without following links."""
        parts = [*self._folder, *PurePosixPath(path).parts]
        if ".." in parts or PurePosixPath(path).is_absolute():
            raise _error(f"{path!r} is no path below a run's artifacts", PERMISSION_DENIED)
        found = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for number, part in enumerate(parts, start=1):
                kind = flags if number == len(parts) else os.O_DIRECTORY
                deeper = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=found)
                os.close(found)
                found = deeper
            yield found
        except OSError as error:
            text = f"artifact {path!r} cannot be read ({error.strerror})"
            raise _error(text, RESOURCE_DOES_NOT_EXIST) from error
        finally:
            os.close(found)


def _error(text: str, code: int) -> MlflowException:
    return MlflowException(text, error_code=code)
