//! What an object store's error means: whose fault it is, and whether to try again.

use std::error::Error as _;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use crate::tier::TierError;
use crate::tier::network::NetworkError;

/// Why a request failed.
#[derive(Debug)]
pub(super) struct Cause {
    pub(super) error: TierError,
    /// Whether another try may do better.
    pub(super) passing: bool,
}

impl Cause {
    /// Something that will not be better the next time.
    pub(super) fn lasting(error: impl Into<TierError>) -> Self {
        Self { error: error.into(), passing: false }
    }

    /// Something that may be.
    pub(super) fn passing(error: NetworkError) -> Self {
        Self { error: error.into(), passing: true }
    }

    /// What `error` means, said by the store that is called `node` of a request to `what`. An
    /// object that is not there is the caller's to notice first.
    pub(super) fn of(error: &Error, node: &str, what: &'static str) -> Self {
        let node = node.to_owned();
        if let Some(kind) = transport(error) {
            if kind == HttpErrorKind::Timeout {
                return Self::passing(NetworkError::TimedOut { node, what });
            }
            let source = std::io::Error::other(innermost(error));
            return Self::passing(NetworkError::Unreachable { what, node, source });
        }
        let text = error.to_string();
        let code = tagged(&text, "Code").unwrap_or_default();
        let message = match tagged(&text, "Message") {
            Some(message) => format!("{code}: {message}"),
            None => first_line(&innermost(error)),
        };
        match code {
            "SlowDown" | "TooManyRequests" | "RequestLimitExceeded" | "ServerBusy" => {
                Self::passing(NetworkError::SlowDown { node })
            }
            "NoSuchBucket" | "ContainerNotFound" => Self::lasting(NetworkError::NoBucket { node }),
            "RequestTimeTooSkewed" => Self::lasting(NetworkError::ClockSkew { node }),
            "QuotaExceeded" | "InsufficientStorage" | "XMinioStorageFull" => {
                Self::lasting(NetworkError::Full { node, message })
            }
            _ if matches!(
                error,
                Error::PermissionDenied { .. } | Error::Unauthenticated { .. }
            ) =>
            {
                Self::lasting(NetworkError::Denied { node, message })
            }
            _ if text.contains("status code: 503") || text.contains("status code: 429") => {
                Self::passing(NetworkError::SlowDown { node })
            }
            _ if text.contains("status code: 5") => {
                Self::passing(NetworkError::Refused { node, message })
            }
            _ => Self::lasting(NetworkError::Refused { node, message }),
        }
    }
}

/// Whether a store says that it can not do what was asked.
pub(super) fn is_unsupported(error: &Error) -> bool {
    matches!(error, Error::NotImplemented { .. } | Error::NotSupported { .. })
        || error.to_string().contains("status code: 501")
}

/// Whether a range lies behind the end of an object.
pub(super) fn is_past_the_end(error: &Error) -> bool {
    error.to_string().contains("status code: 416")
}

/// Whether an error says that the object is not there, and not that the bucket is not.
pub(super) fn is_missing(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) && !error.to_string().contains("NoSuchBucket")
}

fn transport(error: &Error) -> Option<HttpErrorKind> {
    let mut next = error.source();
    while let Some(source) = next {
        if let Some(http) = source.downcast_ref::<HttpError>() {
            return Some(http.kind());
        }
        next = source.source();
    }
    None
}

/// What the bottom of a chain of errors says: the others repeat it.
fn innermost(error: &Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = source.to_string();
        next = source.source();
    }
    text
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// What an XML answer has in `<tag>`.
fn tagged<'a>(text: &'a str, tag: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{tag}>"))?;
    rest.split_once(&format!("</{tag}>")).map(|(inside, _)| inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(status: &str, code: &str) -> Error {
        let text = format!(
            "Error performing PUT http://h/b/k in 1ms - Server returned non-2xx status code: \
             {status}: <Error><Code>{code}</Code><Message>because</Message></Error>"
        );
        Error::Generic { store: "S3", source: text.into() }
    }

    #[test]
    fn each_answer_has_its_cause_and_only_what_passes_is_tried_again() {
        let cases = [
            ("503 Service Unavailable", "SlowDown", "slow down", true),
            ("429 Too Many Requests", "Other", "slow down", true),
            ("500 Internal Server Error", "InternalError", "InternalError: because", true),
            ("404 Not Found", "NoSuchBucket", "no such bucket", false),
            ("403 Forbidden", "RequestTimeTooSkewed", "clock", false),
            ("507 Insufficient Storage", "InsufficientStorage", "is full", false),
            ("400 Bad Request", "Weird", "Weird: because", false),
        ];
        for (status, code, part, passing) in cases {
            let cause = Cause::of(&said(status, code), "s3://b", "PUT");
            assert!(cause.error.to_string().contains(part), "{code}: {}", cause.error);
            assert_eq!(cause.passing, passing, "{code}");
        }
        let denied = Error::PermissionDenied { path: "k".into(), source: "no".into() };
        let cause = Cause::of(&denied, "s3://b", "GET");
        assert!(matches!(cause.error, TierError::Network(NetworkError::Denied { .. })));
        assert!(!cause.passing);
    }

    #[test]
    fn a_missing_object_is_no_missing_bucket() {
        let missing = |text: &str| Error::NotFound { path: "k".into(), source: text.into() };
        assert!(is_missing(&missing("<Code>NoSuchKey</Code>")));
        assert!(!is_missing(&missing("<Code>NoSuchBucket</Code>")));
    }
}
