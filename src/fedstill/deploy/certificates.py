"""The certificates of a deployment: the hub's root signs the hub and every approved site; each makes its own key.

A site's key never leaves its folder. What travels is a request (a name, and a public key signed by its owner) and, back, a kit
(the certificate, the root, and where the hub is).
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..core import files
from ..core.errors import InputError, Shown

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,40}[a-z0-9])?")
RESERVED = ("server", "hub", "admin", "localhost")
ROOT_DAYS, DAYS = 3650, 825
BITS = 3072


def check_name(field: str, name: str) -> str:
    """Return a hub's or site's name if it is one: it stands in certificates, file names and messages."""
    if not NAME.fullmatch(name) or name in RESERVED:
        right = f"1 to 42 of a-z, 0-9 and -, not {', '.join(RESERVED)}; for example clinic-bern"
        raise InputError(field, name, right)
    return name


def new_key(path: Path) -> rsa.RSAPrivateKey:
    """Make a private key and write it to a new file that only its owner can read."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=BITS)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    files.make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    return key


def read_key(path: Path) -> rsa.RSAPrivateKey:
    """Return the private key that `new_key` wrote."""
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, rsa.RSAPrivateKey):
        raise InputError("key", str(path), "an RSA key")
    return key


def root(name: str, key: rsa.RSAPrivateKey) -> x509.Certificate:
    """Return the root's certificate, which signs itself."""
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    builder = _builder(name, name, key.public_key(), key, ROOT_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def certify(
    name: str, public: rsa.RSAPublicKey, ca: x509.Certificate, ca_key: rsa.RSAPrivateKey, hosts: tuple[str, ...] = ()
) -> x509.Certificate:
    """Return a certificate signed by the root: for a hub where it has `hosts`, else for a site."""
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    purposes = [purpose, ExtendedKeyUsageOID.CLIENT_AUTH] if hosts else [purpose]
    usage = x509.KeyUsage(True, False, True, False, False, False, False, False, False)
    builder = _builder(name, name_of(ca), public, ca_key, DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    names = [_alternative(host) for host in hosts or (name,)]
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(ca_key, hashes.SHA256())


def request(name: str, key: rsa.RSAPrivateKey) -> str:
    """Return a certificate request as PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return str(made.public_bytes(serialization.Encoding.PEM), "ascii")


def read_request(where: str, name: str, text: str) -> rsa.RSAPublicKey:
    """Return the public key of a request that its owner has signed under this name."""
    try:
        made = x509.load_pem_x509_csr(text.encode())
        public, signed, common = made.public_key(), made.is_signature_valid, _common(made.subject)
    except (ValueError, TypeError, InvalidSignature):
        raise InputError("request", where, "a file that 'fedstill site request' has written") from None
    if not signed or common != name or not isinstance(public, rsa.RSAPublicKey) or public.key_size < 2048:
        raise InputError("request", where, f"signed with the RSA key of {name!r}: ask the site for a new one")
    return public


def read(where: str, text: str) -> x509.Certificate:
    """Return a certificate from PEM."""
    try:
        return x509.load_pem_x509_certificate(text.encode())
    except (ValueError, TypeError):
        raise InputError("certificate", where, "a certificate in PEM") from None


def check_signed(where: str, certificate: x509.Certificate, ca: x509.Certificate, name: str) -> None:
    """Refuse a certificate that the root has not signed, or not for this name."""
    public, hashed = ca.public_key(), certificate.signature_hash_algorithm
    try:
        assert isinstance(public, rsa.RSAPublicKey)
        assert hashed is not None
        public.verify(certificate.signature, certificate.tbs_certificate_bytes, padding.PKCS1v15(), hashed)
    except (AssertionError, InvalidSignature):
        raise InputError("certificate", where, "one that the hub's root has signed") from None
    if name_of(certificate) != name:
        raise InputError("certificate", Shown(name_of(certificate)), f"that of {name!r}")


def pem(certificate: x509.Certificate) -> str:
    """Return a certificate as PEM."""
    return str(certificate.public_bytes(serialization.Encoding.PEM), "ascii")


def name_of(certificate: x509.Certificate) -> str:
    """Return whom a certificate names."""
    return _common(certificate.subject)


def fingerprint(certificate: x509.Certificate) -> str:
    """Return what two people can read to each other to know that they have the same certificate."""
    digest = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
    return " ".join(digest[i : i + 4] for i in range(0, 32, 4))


def _common(subject: x509.Name) -> str:
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    name: str, issuer: str, public: rsa.RSAPublicKey, signer: rsa.RSAPrivateKey, days: int
) -> x509.CertificateBuilder:
    """Return what every certificate has. Neither subject nor issuer has an organisation: FLARE compares names as a whole."""
    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)  # clocks differ
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
