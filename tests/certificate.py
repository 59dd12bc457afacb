"""A certificate authority for a moment, and a server's certificate by it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

#: ``old``: without key usages and key identifiers, as in many private authorities; OpenSSL's strict mode refuses it.
#: ``strict``: with all fields that RFC 5280 requires. ``intermediate``: another authority signed the bundle's.
#: ``self-signed``: the bundle is the server's own certificate, as ``openssl req -x509`` makes it.
Style = Literal["old", "strict", "intermediate", "self-signed"]


def make_certificate(folder: Path, host: str = "127.0.0.1", days: float = 1, style: Style = "old") -> Path:
    """Write ``ca.pem``, and ``server.pem``: the host's certificate signed by it, and its key. Returns the folder.

    Args:
        days: until both expire; a negative one is past.
    """
    who = x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey) -> bytes:
        ca = name != host or style == "self-signed"
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (issuer, name)]
        builder = (
            x509.CertificateBuilder(names[0], names[1], key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName([who]), critical=False)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if style != "old":
            usage = x509.KeyUsage(name == host, False, False, False, False, ca, ca, False, False)
            identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
            builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    root_key, ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = "kvtiers test CA"
    issuer, issuer_key = ("kvtiers test root", root_key) if style == "intermediate" else (ca, ca_key)
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    if style == "self-signed":
        server_pem = ca_pem = make(host, key, host, key)
    else:
        ca_pem, server_pem = make(ca, ca_key, issuer, issuer_key), make(host, key, ca, ca_key)
    (folder / "ca.pem").write_bytes(ca_pem)
    (folder / "server.pem").write_bytes(server_pem + key.private_bytes(serialization.Encoding.PEM, *plain))
    return folder
