"""How a server is verified, wherever the settings name one."""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.settings.section import Section
from dispatcher.settings.small_files import require_regular
from dispatcher.settings.values import Text, refuse


class TlsSettings(Section):
    """How a TLS server is verified, and what it is shown."""

    ca_file: Text = Field(
        "", description="PEM file with the authorities to trust. Empty: those of the system."
    )
    cert_file: Text = Field(
        "", description="PEM file with our certificate, where the server asks for one (mTLS)."
    )
    key_file: Text = Field("", description="PEM file with its key. Needed together with `cert_file`.")
    insecure_skip_verify: bool = Field(False, description="Accept any certificate. For experiments only.")

    @field_validator("key_file")
    @classmethod
    def _both_or_none(cls, key_file: str, info: ValidationInfo) -> str:
        cert_file = info.data.get("cert_file", key_file)
        if bool(cert_file) != bool(key_file):
            raise refuse("cert_file and key_file are needed together")
        return key_file

    def context(self) -> ssl.SSLContext:
        """What a client speaks TLS by. Raises OSError (ssl.SSLError is one) for a file missing or wrong."""
        for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
            require_regular(Path(path).stat())  # OpenSSL would wait at a pipe
        context = ssl.create_default_context(cafile=self.ca_file or None)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file or None)
        if self.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
