//! One request and its answer, within bounds.

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use bytes::Bytes;
use ipnet::IpNet;
use reqwest::header::{CONTENT_TYPE, HeaderMap, LOCATION};
use reqwest::{Client, Method, Response, StatusCode, Url};
use tokio::time::timeout;

use super::address::{NotAllowed, check_literal};
use super::secret::Secrets;
use crate::config::Redirects;

/// The most redirects followed.
const MAX_REDIRECTS: usize = 5;

/// A request.
pub(in crate::execute) struct Outgoing<'a> {
    pub(in crate::execute) method: Method,
    pub(in crate::execute) url: Url,
    /// Headers for whoever answers.
    pub(in crate::execute) plain: HeaderMap,
    /// Headers about the item, for the origin asked alone, as the secrets are.
    pub(in crate::execute) own: HeaderMap,
    pub(in crate::execute) secrets: &'a Secrets,
    pub(in crate::execute) body: Bytes,
}

/// How much of what an exchange may take.
#[derive(Clone, Debug)]
pub(in crate::execute) struct Bounds {
    /// The wait for the headers of each answer, from the moment it is asked for.
    pub(in crate::execute) header: Duration,
    /// A gap within an answer.
    pub(in crate::execute) idle: Duration,
    /// The body after decompression.
    pub(in crate::execute) bytes: usize,
    /// Which redirects are followed.
    pub(in crate::execute) redirects: Redirects,
}

/// An answer, whole.
pub(in crate::execute) struct Answer {
    pub(in crate::execute) status: StatusCode,
    pub(in crate::execute) headers: HeaderMap,
    pub(in crate::execute) body: Vec<u8>,
}

/// Why there is no whole answer. The texts hold no URL and no secret.
#[derive(Debug, thiserror::Error)]
pub(in crate::execute) enum Trouble {
    /// The target may not be reached; nothing was sent.
    #[error("{0}")]
    NotAllowed(NotAllowed),
    /// There was no connection, so nothing was sent.
    #[error("not sent: {0}")]
    NotSent(String),
    /// The request was sent, at least in part: it may have been executed.
    #[error("{0}; it may have been executed")]
    Lost(String),
    /// The answer is larger than allowed; the rest of it was not read.
    #[error("the answer has more than {0} bytes")]
    TooLarge(usize),
    /// A redirect that is not followed.
    #[error("redirected: {0}")]
    Redirect(&'static str),
}

/// Sends a request and reads the whole answer.
///
/// # Cancel safety
/// Dropped, it closes its connection at once, in whatever state the request is.
pub(in crate::execute) async fn exchange(
    client: &Client,
    outgoing: &Outgoing<'_>,
    bounds: &Bounds,
    allowed: &[IpNet],
) -> Result<Answer, Trouble> {
    let mut method = outgoing.method.clone();
    let mut url = outgoing.url.clone();
    for _ in 0..=MAX_REDIRECTS {
        check_literal(&url, allowed).map_err(Trouble::NotAllowed)?;
        let response = send(client, outgoing, method.clone(), url.clone(), bounds).await?;
        let Some(target) = target(&response, &url) else {
            return read(response, bounds).await;
        };
        match bounds.redirects {
            Redirects::None => return read(response, bounds).await,
            Redirects::SameOrigin if target.origin() != url.origin() => {
                return Err(Trouble::Redirect("to another origin"));
            }
            Redirects::SameOrigin | Redirects::Any => {}
        }
        if !matches!(target.scheme(), "http" | "https") {
            return Err(Trouble::Redirect("to something that is not HTTP"));
        }
        if url.scheme() == "https" && target.scheme() == "http" {
            return Err(Trouble::Redirect("from https to http"));
        }
        let is_post = method == Method::POST;
        match response.status() {
            StatusCode::SEE_OTHER if method != Method::HEAD => method = Method::GET,
            StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND if is_post => method = Method::GET,
            _ => {}
        }
        url = target;
    }
    Err(Trouble::Redirect("too often"))
}

async fn send(
    client: &Client,
    outgoing: &Outgoing<'_>,
    method: Method,
    url: Url,
    bounds: &Bounds,
) -> Result<Response, Trouble> {
    let mut headers = outgoing.plain.clone();
    if url.origin() == outgoing.url.origin() {
        headers.extend(outgoing.own.clone());
        headers.extend(outgoing.secrets.headers.clone());
    }
    let has_body = !matches!(method, Method::GET | Method::HEAD);
    let mut request = client.request(method, url);
    if has_body {
        request = request.body(outgoing.body.clone());
    } else {
        headers.remove(CONTENT_TYPE);
    }
    match timeout(bounds.header, request.headers(headers).send()).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) => Err(trouble(error)),
        Err(_) => Err(Trouble::Lost(format!("no answer within {}", shown(bounds.header)))),
    }
}

/// Where a redirect leads; none where this is none.
fn target(response: &Response, asked: &Url) -> Option<Url> {
    let redirects = [301, 302, 303, 307, 308].contains(&response.status().as_u16());
    let location = response.headers().get(LOCATION).filter(|_| redirects)?;
    asked.join(location.to_str().ok()?).ok()
}

async fn read(mut response: Response, bounds: &Bounds) -> Result<Answer, Trouble> {
    let mut body = Vec::new();
    loop {
        match timeout(bounds.idle, response.chunk()).await {
            Ok(Ok(Some(chunk))) if body.len() + chunk.len() > bounds.bytes => {
                return Err(Trouble::TooLarge(bounds.bytes));
            }
            Ok(Ok(Some(chunk))) => body.extend_from_slice(&chunk),
            Ok(Ok(None)) => break,
            Ok(Err(error)) => {
                return Err(Trouble::Lost(format!("the answer broke off: {}", told(error))));
            }
            Err(_) => {
                let idle = shown(bounds.idle);
                return Err(Trouble::Lost(format!("the answer stood still for {idle}")));
            }
        }
    }
    let (status, headers) = (response.status(), response.headers().clone());
    Ok(Answer { status, headers, body })
}

fn shown(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(time)
}

fn trouble(error: reqwest::Error) -> Trouble {
    let mut cause: Option<&(dyn Error + 'static)> = error.source();
    while let Some(at) = cause {
        if let Some(refused) = at.downcast_ref::<NotAllowed>() {
            return Trouble::NotAllowed(refused.clone());
        }
        cause = at.source();
    }
    if error.is_connect() || error.is_builder() {
        return Trouble::NotSent(told(error));
    }
    Trouble::Lost(format!("the connection broke: {}", told(error)))
}

/// The whole chain of an error, without the URL: it may hold an item's data.
fn told(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = String::new();
    let mut cause: Option<&(dyn Error + 'static)> = error.source();
    while let Some(at) = cause {
        let one = at.to_string();
        // Several libraries repeat their cause in their own text.
        if !text.ends_with(&one) {
            let separator = if text.is_empty() { "" } else { ": " };
            write!(text, "{separator}{one}").expect("a String takes any text");
        }
        cause = at.source();
    }
    if text.is_empty() { error.to_string() } else { text }
}
