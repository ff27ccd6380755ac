//! The client that is measured.

use sqlstreams::Client;

use crate::context::Context;

/// A client whose consumers are told of new messages (`listener`), or find them by polling alone.
pub(crate) async fn client(
    url: &str,
    context: &Context,
    listener: bool,
) -> sqlstreams::Result<Client> {
    Client::builder(url).schema(context.schema()).migrate(false).listener(listener).connect().await
}
