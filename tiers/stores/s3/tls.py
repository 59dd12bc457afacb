"""Makes all S3 clients trust the same certificates, on each version of Python.

All trust the system's certificate authorities (including ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``) and those of one file
(see ``S3Session``). A certificate authority needs neither key usage nor key identifier, which Python's ``ssl`` requires
since version 3.13. It may be signed by another authority that is not trusted.
"""

from __future__ import annotations

import ssl


def set_trust(context: ssl.SSLContext) -> None:
    """Apply this rule to a context. The caller adds the file's certificate authorities."""
    context.load_default_certs()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


def make_context(ca_path: str) -> ssl.SSLContext:
    """A context that trusts the system's certificate authorities and those of a file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    set_trust(context)
    context.load_verify_locations(ca_path)
    return context
