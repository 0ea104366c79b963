"""The overlay for cert-manager: the certificates that it requests, and a cluster with such
certificates."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from deploy.kustomization import Resource, find, render, workloads

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import CertificateRole

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
TOKENS = "shoal-tokens"
USAGES = {
    "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
    "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
}
FIELDS = {
    "Issuer": {"selfSigned", "ca"},
    "Certificate": {
        *("secretName", "commonName", "isCA", "duration", "renewBefore", "uris", "dnsNames"),
        *("usages", "privateKey", "issuerRef"),
    },
}
"""Fields of cert-manager.io/v1 that the overlay uses."""
SCRIPT = """
import shoal, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with shoal.join("train") as session:
    model, optimizer = session.distribute(model, optimizer, strategy="async-sgd")
    torch.manual_seed(0)
    data = torch.randn(64, 8), torch.randn(64, 1)
    for batch in session.batches(data, global_batch_size=8, epochs=2):
        with session.step():
            session.backward(torch.nn.functional.mse_loss(model(batch.inputs), batch.targets))
"""


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    return render(KUBERNETES / "overlays" / "cert-manager")


def of_kind(resources: list[Resource], kind: str) -> dict[str, dict[str, Any]]:
    return {r["metadata"]["name"]: r["spec"] for r in resources if r["kind"] == kind}


@pytest.mark.long
def test_resources_are_valid_by_kubernetes_schemas(
    resources: list[Resource], tmp_path: Path
) -> None:
    """Kubernetes' own resources are valid by its schemas, cert-manager's have only known fields."""
    theirs = [r for r in resources if r["apiVersion"] == "cert-manager.io/v1"]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all([r for r in resources if r not in theirs]))
    program = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([program, "--strict", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for resource in theirs:
        assert set(resource["spec"]) <= FIELDS[resource["kind"]]


def test_nothing_else_makes_certificates(resources: list[Resource]) -> None:
    """The Deployment that otherwise makes them is absent, with its rights and the Secrets that it
    fills."""
    assert {r["metadata"]["name"] for r in workloads(resources)} == {
        *("etcd", "coordinator", "ps", "worker"),
    }
    assert not {r["kind"] for r in resources} & {"Secret", "Role", "RoleBinding"}


def sources_of(workload: Resource) -> dict[str, tuple[str, str]]:
    """Secret and key in the Secret of each file that the part gets, by the file's path."""
    [own] = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "own"]
    if "secret" in own:
        name = own["secret"]["secretName"]
        return {item["path"]: (name, item["key"]) for item in own["secret"]["items"]}
    return {
        item["path"]: (source["secret"]["name"], item["key"])
        for source in own["projected"]["sources"]
        for item in source["secret"]["items"]
    }


def test_each_part_gets_the_same_files_as_in_the_base(resources: list[Resource]) -> None:
    """Files have the same names; their Secrets are filled by a Certificate, or hold the tokens."""
    made = {spec["secretName"] for spec in of_kind(resources, "Certificate").values()}
    base = render(KUBERNETES / "base")
    for workload in workloads(resources):
        name = workload["metadata"]["name"]
        plain = find(base, kinds={workload["kind"]}, name=name)
        sources = sources_of(workload)
        assert set(sources) == set(sources_of(plain))
        for secret, key in sources.values():
            assert secret == TOKENS or (secret in made and key in {"ca.crt", "tls.crt", "tls.key"})


def issued(certificates: dict[str, dict[str, Any]], name: str, folder: Path) -> None:
    """Write the files of a Certificate's Secret as cert-manager does, those of its authority
    first."""
    spec = certificates[name]
    to = folder / spec["secretName"]
    if to.is_dir():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
    authority, signer, issuer = b"", key, subject
    if spec["issuerRef"]["name"] != "self-signed":
        above = f"{spec['issuerRef']['name']}-authority"
        issued(certificates, above, folder)
        at = folder / certificates[above]["secretName"]
        authority = (at / "tls.crt").read_bytes()
        issuer = x509.load_pem_x509_certificate(authority).subject
        signer = _key(at / "tls.key")
    names: list[x509.GeneralName] = [x509.DNSName(n) for n in spec.get("dnsNames", ())]
    names += [x509.UniformResourceIdentifier(uri) for uri in spec.get("uris", ())]
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=int(spec["duration"].removesuffix("h"))))
        .add_extension(x509.BasicConstraints(ca=spec.get("isCA", False), path_length=None), True)
    )
    purposes = [USAGES[each] for each in spec.get("usages", ()) if each in USAGES]
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)
    to.mkdir()
    (to / "tls.crt").write_bytes(pem)
    (to / "ca.crt").write_bytes(authority or pem)
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (to / "tls.key").write_bytes(plain)


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    found = load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(found, ec.EllipticCurvePrivateKey)
    return found


@pytest.mark.long
def test_a_cluster_trains_with_these_certificates(
    resources: list[Resource], tmp_path: Path
) -> None:
    """Certificates are issued as cert-manager issues those of the manifests, and mounted as the
    manifests say."""
    certificates = of_kind(resources, "Certificate")
    for name in certificates:
        issued(certificates, name, tmp_path)
    folder = tmp_path / "certs"
    folder.mkdir()
    for role in CertificateRole:
        secret = tmp_path / f"{role.value}-tls"
        for kind in ("crt", "key"):
            (folder / f"{role.value}.{kind}").write_bytes((secret / f"tls.{kind}").read_bytes())
    (folder / "ca.crt").write_bytes((tmp_path / "worker-tls" / "ca.crt").read_bytes())
    for path in folder.iterdir():
        path.chmod(0o600)
    worker: TlsFiles = in_folder(folder, CertificateRole.WORKER)
    config = LocalClusterConfig(
        directory=tmp_path / "cluster", num_parameter_servers=1, certificates=folder
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    with LocalCluster(config) as cluster:
        given = {
            "SHOAL_TLS_CA": str(worker.ca),
            "SHOAL_TLS_CERT": str(worker.cert),
            "SHOAL_TLS_KEY": str(worker.key),
        }
        command = [str(Path(sys.executable).with_name("shoal")), "run", "-n", "2", "--job", "train"]
        done = subprocess.run(
            [*command, "--coordinator", cluster.coordinator, "train.py"],
            env={**os.environ, **given, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    assert done.returncode == 0, done.stdout + done.stderr
