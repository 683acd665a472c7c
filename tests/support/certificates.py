"""Certificates of servers on this machine that speak TLS."""

from __future__ import annotations

from pathlib import Path

import trustme


def certificates(folder: Path) -> dict[str, str]:
    """Make some in `folder`; the directives of a server that uses them."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "::1", "localhost")
    trusted, key, chain = folder / "ca.pem", folder / "key.pem", folder / "chain.pem"
    authority.cert_pem.write_to_path(str(trusted))
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(chain))
    return {
        "tls_cert_file": str(chain),
        "tls_key_file": str(key),
        "tls_ca_cert_file": str(trusted),
        "tls_auth_clients": "no",
    }
