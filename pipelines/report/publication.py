"""The files of a publication: the page, the final table, its methodology and its metadata.

They lie in one folder, each replaced when its new content is complete, and only where it was
written by this command: ``index.html`` (the page of `dpstream report`, written last),
``final.parquet`` and ``final.csv`` (every value, with its mark), the methodology as Markdown,
``metadata.jsonld`` (DCAT 3) and ``deployment.yaml``, an entry for a registry of deployments of
differential privacy.  What ``[job.NAME.publication]`` does not say is left out.  The registry
requires some of it, and an entry without that, or of a run whose guarantee does not hold, is not
written.
"""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import yaml

from dpstream.accounting.errors import UsageError
from dpstream.accounting.facts import UNBOUNDED
from dpstream.accounting.figures import moment_of, time_text, up
from dpstream.pipelines.connectors.final import final_in, require_final, write_final
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import PublicationSection
from dpstream.pipelines.render.page import require_own, write_own
from dpstream.pipelines.report.methodology import methodology
from dpstream.pipelines.report.report import MARK, Report
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import make_folder

FLAG = "--publish"
PAGE, METHODOLOGY, METADATA, DEPLOYMENT = (
    "index.html",
    "methodology" + ".md",
    "metadata.jsonld",
    "deployment.yaml",
)
_CONTEXT = {
    "dpstream": "urn:dpstream:",
    "dcat": "http://www.w3.org/ns/dcat#",
    "dct": "http://purl.org/dc/terms/",
    "foaf": "http://xmlns.com/foaf/0.1/",
    "vcard": "http://www.w3.org/2006/vcard/ns#",
    "skos": "http://www.w3.org/2004/02/skos/core#",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
}
#: How the files begin, and no other file does.
_MARKS = {
    PAGE: MARK,
    METHODOLOGY: "<!-- written by dpstream report ",
    METADATA: '{\n  "@context": {\n    "dpstream": "urn:dpstream:",',
    DEPLOYMENT: "# written by dpstream report\n",
}
#: Names of how often windows begin, of the European Union's vocabulary.
_FREQUENCIES = {
    "1 hour": "HOURLY",
    "1 day": "DAILY",
    "7 days": "WEEKLY",
    "1 week": "WEEKLY",
    "1 month": "MONTHLY",
}
_FREQUENCY = "http://publications.europa.eu/resource/authority/frequency/"
_MEDIA = "https://www.iana.org/assignments/media-types/"
#: The line of an entry that has its date.
_DATE = re.compile(r"^ *publication_date: '?(\d{4}-\d\d-\d\d)'?$", re.MULTILINE)
#: Fields of the section that the registry requires, by its own names.
_REQUIRED = {
    "data_curators": "publisher",
    "description": "description",
    "intended_use": "purpose",
    "data_product_region": "region",
}


class Published(NamedTuple):
    """What was written.

    Attributes:
        files: names in the folder.
        lacking: fields of ``[job.NAME.publication]`` without which there is no registry entry.
    """

    files: list[str]
    lacking: list[str]


def publish(report: Report, page: Callable[[Sequence[str]], str], folder: Path) -> Published:
    """Write the files of a publication to a folder.

    Args:
        report: without true errors, which are not private.
        page: returns its HTML, which links to files of these names beside it.

    Raises:
        UsageError: another file is there; nothing was released.
        RunError: a file cannot be written.
    """
    job = report.job
    sink = job.sink.folder
    if sink is None or sink.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UsageError(FLAG, "lies in the folder of the releases", "choose another folder")
    publication = job.section.publication or PublicationSection(title=job.name)
    lacking = [field for field in _REQUIRED.values() if not getattr(publication, field)]
    facts = final_in(job, sink).facts
    texts = {
        METHODOLOGY: _methodology(report, facts, publication),
        METADATA: _metadata(report, facts, publication),
    }
    with file_errors(FLAG, "cannot be written"):
        make_folder(folder)
    tables = ["final.parquet", "final.csv"]
    for name, mark in (_MARKS | {METHODOLOGY: _mark(job)}).items():
        require_own(folder / name, mark, FLAG)
    for name in tables:
        require_final(folder / name, FLAG)
    if not lacking and not report.stamps:
        texts[DEPLOYMENT] = _deployment(report, facts, publication, folder / DEPLOYMENT)
    else:  # an earlier one may state what no longer holds
        with file_errors(FLAG, "cannot be replaced"):
            (folder / DEPLOYMENT).unlink(missing_ok=True)
    for name in tables:
        write_final(final_in(job, sink), job, folder / name, FLAG)
    names = [*tables, *texts]
    for name, text in (texts | {PAGE: page(names)}).items():
        # All files of the folder are this job's, so any of them may be replaced.
        write_own(folder / name, text, _MARKS[name], option=FLAG)
    return Published([PAGE, *names], lacking)


def _mark(job: Job) -> str:
    """How the methodology of a job begins: a folder has the publication of one job."""
    return f"{_MARKS[METHODOLOGY]}{quote(job.name)} -->\n"


def _guarantee(facts: dict[str, Any]) -> str:
    """The guarantee of one unit in one line."""
    pair, stamps = facts["guarantee"], facts["run"]["stamps"]
    if stamps:
        return f"none: {', '.join(stamps)}"
    return f"epsilon {up(pair['epsilon'])} at delta {up(pair['delta'])}, {facts['unit']['text']}"


def _lifetime(facts: dict[str, Any]) -> str:
    """The guarantee of a person of all periods in one line."""
    every, stamps = facts["lifetime"], facts["run"]["stamps"]
    if stamps:
        return f"none: {', '.join(stamps)}"
    if every == UNBOUNDED:
        return "without a bound: the job has no last period"
    several = f", for whoever has records in all {every['periods']:,} periods"
    return f"epsilon {up(every['epsilon'])} at delta {up(every['delta'])}" + (
        several if every["periods"] > 1 else ""
    )


def _methodology(report: Report, facts: dict[str, Any], publication: PublicationSection) -> str:
    """The methodology as Markdown: the text of the page, then the exact figures."""
    lines = [
        _mark(report.job),  # then the title on one line, without marks of HTML
        "# Methodology: " + " ".join(publication.title.split()).replace("<", "&lt;"),
        "",
    ]
    lines += [f"**{stamp}: this is not to be published.**\n" for stamp in report.stamps]
    for heading, texts in methodology(report.plan, report.figures, publication):
        lines += [f"## {heading}", ""] + [f"{text}\n" for text in texts]
    run, mechanism = facts["run"], facts["mechanism"]
    figures = {
        "guarantee": _guarantee(facts),
        "lifetime": _lifetime(facts),
        "records of a unit that count": f"{facts['contributions']:,}",
        "noise": mechanism["noise"],
        "keys": mechanism["keys"],
        "plan": run["plan_hash"],
        "run": run["run_id"],
        "program": run["program"],
        "contact": publication.contact or "not stated",
        "licence": publication.licence or "not stated",
    }
    lines += ["## Figures", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text.replace('|', ' ')} |" for name, text in figures.items()]
    return "\n".join(lines) + "\n"


def _metadata(report: Report, facts: dict[str, Any], publication: PublicationSection) -> str:
    """The data set in terms of DCAT 3, as JSON; what is not stated is left out."""
    timeline, contact = report.job.plan.timeline, publication.contact
    days = {"dcat:startDate": timeline.start, "dcat:endDate": timeline.end}
    frequency = _FREQUENCIES.get(timeline.words(timeline.slide))
    email = (
        {"vcard:hasEmail": {"@id": f"mailto:{contact}"}}
        if "@" in contact and " " not in contact
        else {}
    )
    named: dict[str, Any] = {
        "dct:description": publication.description,
        "dct:publisher": _node("foaf:Agent", "foaf:name", publication.publisher),
        "dcat:contactPoint": _node("vcard:Kind", "vcard:fn", contact) | (email if contact else {}),
        "dct:license": _node("dct:LicenseDocument", "dct:title", publication.licence),
        "dct:bibliographicCitation": publication.citation,
        "dct:spatial": _node("dct:Location", "skos:prefLabel", publication.region),
        "dct:accrualPeriodicity": {"@id": _FREQUENCY + frequency} if frequency else "",
    }
    metadata = {
        "@context": _CONTEXT,
        "@type": "dcat:Dataset",
        "dct:identifier": facts["run"]["run_id"],
        "dct:title": publication.title,
        **{name: value for name, value in named.items() if value},
        "dct:temporal": {
            "@type": "dct:PeriodOfTime",
            **{
                name: {"@type": "xsd:dateTime", "@value": time_text(moment_of(micros))}
                for name, micros in days.items()
                if micros is not None
            },
        },
        "dcat:landingPage": {"@id": PAGE},
        "foaf:page": {"@id": METHODOLOGY},
        "dcat:distribution": [
            {
                "@type": "dcat:Distribution",
                "dct:title": f"final.{kind}",
                "dcat:downloadURL": {"@id": f"final.{kind}"},
                "dcat:mediaType": {"@id": _MEDIA + media},
            }
            for kind, media in (
                ("parquet", "application/vnd.apache.parquet"),
                ("csv", "text/csv"),
            )
        ],
        "dpstream:guarantee": _guarantee(facts),
        "dpstream:lifetime": _lifetime(facts),
        "dpstream:plan": facts["run"]["plan_hash"],
        "dpstream:program": facts["run"]["program"],
    }
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2).decode() + "\n"


def _node(kind: str, name: str, text: str) -> dict[str, Any]:
    return {"@type": kind, name: text} if text else {}


def _deployment(
    report: Report, facts: dict[str, Any], publication: PublicationSection, old: Path
) -> str:
    """The entry of the registry; the date is that of the first one, which ``old`` has."""
    job, guarantee, mechanism = report.job, facts["guarantee"], facts["mechanism"]
    # An old entry was written by this command, and perhaps edited since.
    stated = _DATE.search(old.read_text("utf-8", "replace")) if old.exists() else None
    date = datetime.now(UTC).date().isoformat() if stated is None else stated[1]
    pure, dynamic = not guarantee["delta"], job.source.unbounded or job.plan.timeline.end is None
    covers, bounds = guarantee["covers"], facts["values"]
    periods = (
        "one budget covers all releases" if covers == "lifetime" else f"a new budget every {covers}"
    )
    clamped = [f"{v['column']} in {v['bounds']}" for v in bounds if v["bounds"] is not None]
    basic = {registry: getattr(publication, field) for registry, field in _REQUIRED.items()}
    entry = {
        "url_slug": "-".join("".join(c if c.isalnum() else " " for c in job.name.lower()).split()),
        "status": "Draft",
        "tier": 2,
        "deployment": {
            "basic": basic
            | {
                "name": publication.title,
                "data_curators": [publication.publisher],
                "data_product_type": "Summary statistics",
                "publication_date": date,
            },
            "dp_variant": {
                "variant_name": "Pure DP" if pure else "Approximate DP",
                "unprotected_quantities": "The public clock (windows and triggers)"
                + (", and the list of keys." if mechanism["keys"] != "selected privately" else "."),
            },
            "privacy_loss": {
                "privacy_unit": facts["unit"]["text"],
                "privacy_unit_details": guarantee["neighbours"],
                "privacy_parameters": {
                    "epsilon": guarantee["epsilon"],
                    "delta": guarantee["delta"],
                },
                "privacy_parameters_details": f"For a person's lifetime: {_lifetime(facts)}.",
            },
            "deployment_model": {
                "model_name": "Central",
                "release_type": "Many releases",
                "release_type_details": f"A release every "
                f"{job.plan.timeline.words(job.plan.timeline.trigger_every)}; {periods}.",
                "data_source_type": "Dynamic" if dynamic else "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "The newest release of each window, with 95% intervals of the "
                "noise and marks of quality.",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": f"At most {facts['contributions']} "
                f"records of a unit count; values are clamped: {'; '.join(clamped) or 'none'}.",
                "mechanisms": f"{mechanism['noise']} noise under continual observation; keys: "
                f"{mechanism['keys']}; {facts['run']['program']}, "
                f"plan {facts['run']['plan_hash']}.",
            },
        },
    }
    return _MARKS[DEPLOYMENT] + str(yaml.safe_dump(entry, sort_keys=False, allow_unicode=True))
