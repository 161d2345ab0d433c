//! Admission of a batch: read, validate, digest, spool, and store.
//!
//! Everything is looked at before anything is stored. [`read_items`] goes through the input once,
//! in constant memory (24 bytes an item, to find repeated keys, beside one line), writes what is
//! valid to an unnamed temporary file, and either returns that file ([`Spooled`]) or a [`Report`]
//! of every line that is wrong. So a slow or broken upload holds no transaction, and one bad line
//! creates nothing. [`NewBatch::validate`] does the same for what belongs to the batch as a whole.
//! [`Submission`] puts all of it together, for every way in: [`Submission::read`] ends with a batch
//! that is valid as a whole, [`Admitted::store`] stores it in one transaction.
//!
//! # What is accepted
//!
//! Text in UTF-8, one item a line, in one of two forms ([`Form`]). A line ends with LF or CR LF,
//! the last one may end with the input. Lines of nothing but ASCII white space are skipped, yet
//! they count: problems name physical lines, from 1. A UTF-8 byte-order mark at the very start is
//! skipped; UTF-16 is refused as such.
//!
//! - **JSON lines**: an object with `key` (text), `input` (any JSON value), and, both optional and
//!   possibly null, `acceptance_criteria` (a list) and `not_before` (RFC 3339, kept to the
//!   microsecond). Other members, repeated members and other types are problems. `input` is kept
//!   as it was written, digit for digit and blank for blank. Its arrays and objects nest at most
//!   [`MAX_DEPTH`] levels.
//! - **Plain lines**: the line is the key, and as a JSON string the input.
//!
//! Keys are unique in their batch and hold no control character below U+0020 but the tab. No text holds U+0000
//! (`PostgreSQL` text and program arguments cannot carry it) or a lone surrogate (which is no
//! character), not even escaped. Sizes are bounded by [`SubmitLimits`].

mod admit;
mod batch;
mod keys;
mod reader;
mod report;
mod spool;
mod validate;

pub use admit::{Admitted, Submission};
pub use batch::NewBatch;
pub use reader::{Form, Progress, SubmitError, SubmitLimits, read_items};
pub use report::{Problem, Report};
pub use spool::{Spooled, SpooledItems};
pub use validate::MAX_DEPTH;
