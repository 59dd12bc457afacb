"""A certificate authority for a moment, and a server's certificate by it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_certificate(folder: Path, host: str = "127.0.0.1", days: float = 1) -> Path:
    """Write ``ca.pem``, and ``server.pem``: the host's certificate signed by it, and its key. Returns the folder.

    Args:
        days: until both expire; a negative one is past.
    """
    who = x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, ca: bool) -> bytes:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvtiers test CA")])
        made = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName([who]), critical=False)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(signer, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "ca.pem").write_bytes(make("kvtiers test CA", ca_key, ca_key, True))
    (folder / "server.pem").write_bytes(
        make(host, key, ca_key, False) + key.private_bytes(serialization.Encoding.PEM, *plain)
    )
    return folder
