"""TLS settings of a connection, wherever the settings name a server."""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.settings.section import Section
from dispatcher.settings.small_files import require_regular
from dispatcher.settings.values import Text, setting_error


class TlsSettings(Section):
    """Verification of a TLS server, and the client certificate."""

    ca_file: Text = Field(
        "", description="PEM file with the trusted certificate authorities. If empty, those of the system."
    )
    cert_file: Text = Field(
        "", description="PEM file with the client certificate, if the server requires one (mTLS)."
    )
    key_file: Text = Field(
        "", description="PEM file with the key of the client certificate. Required together with `cert_file`."
    )
    insecure_skip_verify: bool = Field(
        False, description="If true, any certificate is accepted. For experiments only."
    )

    @field_validator("key_file")
    @classmethod
    def _check_key_pair(cls, key_file: str, info: ValidationInfo) -> str:
        cert_file = info.data.get("cert_file", key_file)
        if bool(cert_file) != bool(key_file):
            raise setting_error("cert_file and key_file are needed together")
        return key_file

    def build_context(self) -> ssl.SSLContext:
        """Return the SSL context of a client. Raises OSError (or its subclass ssl.SSLError) if a file is
        missing or not valid."""
        for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
            require_regular(Path(path).stat())  # OpenSSL would block on a pipe without a writer
        context = ssl.create_default_context(cafile=self.ca_file or None)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file or None)
        if self.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
