//! `sqlstreams doctor`.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use sqlstreams::{Client, Doctor, Finding, Severity};

use crate::context::Context;
use crate::failure::EXIT_FAILED;
use crate::output::{print, print_json, printable};

const AFTER_HELP: &str = "\
Meant for after a restore, and for whenever something is strange. Looking changes nothing, waits for nobody and takes about as
long however much there is in the streams. Each finding has a code, which scripts can go by, and says what to do.

With --fix, what can safely be repaired is: sequences are moved, so that no id is used twice, parts that are missing are made, detached
partitions are attached again, and functions, defaults and sequences that somebody has changed are what this version makes them.
Each repair is a transaction of its own and leaves a row in the table audit. Only the owner of the tables may.

The exit code is 1 if an error is left, 0 if there are none, warnings or not.

Examples:
  sqlstreams doctor
  sqlstreams doctor orders
  sqlstreams doctor --fix
  sqlstreams doctor --json | jq -r '.findings[].code'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DoctorArgs {
    /// Look at this stream alone
    stream: Option<String>,
    /// Repair what can safely be repaired
    #[arg(long)]
    fix: bool,
}

/// What one repair brings to light another may repair; more rounds than that would be no progress.
const ROUNDS: usize = 6;

/// A finding that was repaired, or why it was not.
struct Repair {
    finding: Finding,
    outcome: sqlstreams::Result<Value>,
}

pub(crate) async fn run(args: DoctorArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let url = context.database_url().await?;
    let doctor = Client::builder(&url).schema(context.schema()).doctor().await?;
    let stream = args.stream.as_deref();
    let mut findings = doctor.look_at(stream).await?;
    let mut repairs = Vec::new();
    if args.fix {
        for _ in 0..ROUNDS {
            let progress = repair(&doctor, findings, &mut repairs).await;
            findings = doctor.look_at(stream).await?;
            if !progress {
                break;
            }
        }
    }
    let errors = findings.iter().filter(|found| found.severity == Severity::Error).count();
    if context.json() {
        let repairs: Vec<Value> = repairs.iter().map(Repair::to_json).collect();
        let findings: Vec<Value> = findings.iter().map(to_json).collect();
        print_json(&json!({"findings": findings, "repairs": repairs, "errors": errors}))?;
    } else {
        tell(&findings, &repairs, args.fix)?;
    }
    Ok(if errors > 0 { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS })
}

/// Repairs what it can; whether it could anything that was not tried in vain before.
async fn repair(doctor: &Doctor, findings: Vec<Finding>, repairs: &mut Vec<Repair>) -> bool {
    let mut progress = false;
    for finding in findings.into_iter().filter(|finding| finding.fixable) {
        let is_same =
            |r: &Repair| r.finding.code == finding.code && r.finding.stream == finding.stream;
        if repairs.iter().any(is_same) {
            continue;
        }
        let outcome = doctor.repair(&finding).await;
        progress |= outcome.is_ok();
        repairs.push(Repair { finding, outcome });
    }
    progress
}

fn tell(findings: &[Finding], repairs: &[Repair], fix: bool) -> anyhow::Result<()> {
    for repair in repairs {
        let about = about(&repair.finding);
        match &repair.outcome {
            Ok(_) => print(format_args!("repaired {about}: {}", repair.finding.message))?,
            Err(error) => print(format_args!("not repaired {about}: {error}"))?,
        }
    }
    for finding in findings {
        let message = printable(&finding.message, 1_000);
        print(format_args!("{}: {}: {message}", finding.severity, about(finding)))?;
        let hint = match fix {
            // It was of no use.
            true => finding.hint.replace("--fix", "`sqlstreams doctor --fix`"),
            false => finding.hint.clone(),
        };
        print(format_args!("  {hint}"))?;
    }
    if findings.is_empty() {
        print("nothing is wrong")?;
    }
    Ok(())
}

/// Its code, and what it is about.
fn about(finding: &Finding) -> String {
    match (&finding.stream, &finding.group) {
        (Some(stream), Some(group)) => {
            format!("{} (stream {stream:?}, group {group:?})", finding.code)
        }
        (Some(stream), None) => format!("{} (stream {stream:?})", finding.code),
        _ => finding.code.clone(),
    }
}

fn to_json(finding: &Finding) -> Value {
    json!({
        "code": finding.code,
        "severity": finding.severity.as_str(),
        "stream": finding.stream,
        "group": finding.group,
        "message": finding.message,
        "hint": finding.hint,
        "fixable": finding.fixable,
        "detail": finding.detail,
    })
}

impl Repair {
    fn to_json(&self) -> Value {
        let mut repair = to_json(&self.finding);
        match &self.outcome {
            Ok(done) => repair["done"] = done.clone(),
            Err(error) => {
                repair["error"] = json!({"code": error.code(), "message": error.to_string(), "hint": error.hint()})
            }
        }
        repair
    }
}
