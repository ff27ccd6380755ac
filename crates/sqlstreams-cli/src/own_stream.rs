//! A stream that a command makes for itself and drops at its end.

use std::time::Duration;

use sqlstreams::{Client, ErrorKind, Stream};

use crate::failure::Failure;

/// How long dropping the stream may take.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// A stream whose name nobody has: the prefix and some digits.
pub(crate) async fn create<T: Send + Sync + 'static>(
    client: &Client,
    prefix: &str,
) -> sqlstreams::Result<Stream<T>>
where
    sqlstreams::Json: sqlstreams::Codec<T>,
{
    loop {
        let name = format!("{prefix}{:08x}", fastrand::u32(..));
        match client.stream(name).create().await {
            Err(error) if error.kind() == ErrorKind::StreamExists => {}
            created => return created,
        }
    }
}

/// Drops the stream, or says how to.
pub(crate) async fn drop<T>(stream: Stream<T>) -> Result<(), Failure>
where
    sqlstreams::Json: sqlstreams::Codec<T>,
{
    let name = stream.name().to_owned();
    let why = match tokio::time::timeout(DROP_TIMEOUT, stream.drop_stream()).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("the database did not do it within {DROP_TIMEOUT:?}"),
    };
    Err(Failure::failed("stream_left", format!("the stream {name} is still there: {why}"))
        .hint(format!("Run `sqlstreams stream drop {name} --yes`.")))
}
