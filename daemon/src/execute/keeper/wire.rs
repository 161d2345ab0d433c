//! What worker and keeper say to each other, one message in one datagram (`SOCK_SEQPACKET`).
//!
//! Two pairs of sockets: launches go one way with the descriptors of the child's streams, and may
//! have to wait for one that is slow to start; orders and reports are a few bytes and never wait.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send,
    sendmsg, socketpair,
};
use uuid::Uuid;

use crate::clock::BootInstant;
use crate::execute::spawner::{Exit, SpawnRequest};
use crate::model::LeaseId;

/// The longest launch that is sent as it is; a longer one travels in an anonymous file.
const INLINE_BYTES: usize = 64 * 1024;
/// The longest launch at all: more than any kernel takes for arguments and environment.
const LAUNCH_BYTES: usize = 8 * 1024 * 1024;
/// Standard input, output, error, and the file of a long launch.
const DESCRIPTORS: usize = 4;

/// Two connected sockets, closed on exec.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// An execution, as worker and keeper name it.
pub(super) type ExecutionId = u64;

/// What the worker asks for. All of it may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The executions of a lease are trusted until then.
    Extend(LeaseId, BootInstant),
    /// Send TERM to its group.
    Terminate(ExecutionId),
    /// Kill what is left of it, and say when that is gone.
    End(ExecutionId),
}

impl Order {
    const BYTES: usize = 25;

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        let (tag, first, second) = match self {
            Self::Extend(lease, until) => (1, lease.uuid().as_u128(), until.as_nanos()),
            Self::Terminate(id) => (2, 0, id),
            Self::End(id) => (3, 0, id),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0] = tag;
        bytes[1..17].copy_from_slice(&first.to_le_bytes());
        bytes[17..].copy_from_slice(&second.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        let (tag, first, second) = (fields.byte()?, fields.u128()?, fields.u64()?);
        match tag {
            1 => Ok(Self::Extend(
                LeaseId::from_uuid(Uuid::from_u128(first)),
                BootInstant::from_nanos(second),
            )),
            2 => Ok(Self::Terminate(second)),
            3 => Ok(Self::End(second)),
            _ => Err(garbled()),
        }
    }
}

/// Why a launch failed, as [`SpawnError`](crate::execute::spawner::SpawnError) tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    System(i32),
    WorkingDirectory(i32),
    Program(i32),
    /// The lease is no longer trusted, or the keeper is ending.
    TooLate,
}

/// What became of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// It runs.
    Started(ExecutionId),
    /// Nothing was started.
    Failed(ExecutionId, Failure),
    /// Its leader has exited; others of it may still run.
    Exited(ExecutionId),
    /// Nothing of it runs any more.
    Gone(ExecutionId, Exit),
}

impl Report {
    const BYTES: usize = 13;

    fn encode(self) -> [u8; Self::BYTES] {
        let (tag, id, value) = match self {
            Self::Started(id) => (1, id, 0),
            Self::Failed(id, Failure::System(errno)) => (2, id, errno),
            Self::Failed(id, Failure::WorkingDirectory(errno)) => (3, id, errno),
            Self::Failed(id, Failure::Program(errno)) => (4, id, errno),
            Self::Failed(id, Failure::TooLate) => (5, id, 0),
            Self::Exited(id) => (6, id, 0),
            Self::Gone(id, Exit::Status(status)) => (7, id, status),
            Self::Gone(id, Exit::Signal(signal)) => (8, id, signal),
            Self::Gone(id, Exit::Fenced) => (9, id, 0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0] = tag;
        bytes[1..9].copy_from_slice(&id.to_le_bytes());
        bytes[9..].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        let (tag, id, value) = (fields.byte()?, fields.u64()?, fields.i32()?);
        Ok(match tag {
            1 => Self::Started(id),
            2 => Self::Failed(id, Failure::System(value)),
            3 => Self::Failed(id, Failure::WorkingDirectory(value)),
            4 => Self::Failed(id, Failure::Program(value)),
            5 => Self::Failed(id, Failure::TooLate),
            6 => Self::Exited(id),
            7 => Self::Gone(id, Exit::Status(value)),
            8 => Self::Gone(id, Exit::Signal(value)),
            9 => Self::Gone(id, Exit::Fenced),
            _ => return Err(garbled()),
        })
    }
}

/// Sends an order; waits while the socket is full.
pub(super) fn send_order(to: impl AsFd, order: Order) -> io::Result<()> {
    Ok(send(to, &order.encode(), SendFlags::NOSIGNAL).map(drop)?)
}

/// Sends a report, or says that the socket is full.
pub(super) fn send_report(to: impl AsFd, report: Report) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(send(to, &report.encode(), flags).map(drop)?)
}

/// The next order that is there already; none when the other side has gone.
pub(super) fn next_order(from: impl AsFd) -> io::Result<Option<Order>> {
    let mut bytes = [0; Order::BYTES];
    let length = receive(from, &mut bytes, RecvFlags::DONTWAIT)?;
    if length == 0 { Ok(None) } else { Order::decode(&bytes[..length]).map(Some) }
}

/// Waits for the next report; none when the other side has gone.
pub(super) fn next_report(from: impl AsFd) -> io::Result<Option<Report>> {
    let mut bytes = [0; Report::BYTES];
    let length = receive(from, &mut bytes, RecvFlags::empty())?;
    if length == 0 { Ok(None) } else { Report::decode(&bytes[..length]).map(Some) }
}

fn receive(from: impl AsFd, bytes: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    loop {
        match rustix::net::recv(&from, &mut *bytes, flags) {
            Ok((length, _)) => return Ok(length),
            Err(Errno::INTR) => {}
            // A peer that ended with messages unread.
            Err(Errno::CONNRESET) => return Ok(0),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A process to start under a lease.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) id: ExecutionId,
    /// TERM at this time, unless the lease is extended.
    pub(super) trusted_until: BootInstant,
    /// KILL so long after it, in nanoseconds.
    pub(super) grace_ns: u64,
    pub(super) request: SpawnRequest,
}

impl Launch {
    /// The message: numbers, then texts ended by NUL.
    ///
    /// # Errors
    /// When it is longer than any kernel would take.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let SpawnRequest { lease, programs, argv, env, cwd, pipe_stdin } = &self.request;
        let texts = || [cwd].into_iter().chain(programs.iter()).chain(argv).chain(env);
        let length = 64 + texts().map(|text| text.as_bytes_with_nul().len()).sum::<usize>();
        if length > LAUNCH_BYTES {
            return Err(Errno::TOOBIG.into());
        }
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(lease.uuid().as_u128().to_le_bytes());
        bytes.extend(self.trusted_until.as_nanos().to_le_bytes());
        bytes.extend(self.grace_ns.to_le_bytes());
        bytes.push(u8::from(*pipe_stdin));
        for count in [programs.len(), argv.len(), env.len()] {
            bytes.extend(u32::try_from(count).map_err(|_| Errno::TOOBIG)?.to_le_bytes());
        }
        texts().for_each(|text| bytes.extend(text.as_bytes_with_nul()));
        Ok(bytes)
    }

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        let id = fields.u64()?;
        let lease = LeaseId::from_uuid(Uuid::from_u128(fields.u128()?));
        let trusted_until = BootInstant::from_nanos(fields.u64()?);
        let grace_ns = fields.u64()?;
        let pipe_stdin = fields.byte()? != 0;
        let counts = [fields.u32()?, fields.u32()?, fields.u32()?];
        let cwd = fields.text()?;
        // A count is believed only as far as there are texts.
        let mut texts =
            |count: u32| (0..count).map(|_| fields.text()).collect::<Result<Vec<_>, _>>();
        let programs: Arc<[CString]> = texts(counts[0])?.into();
        let (argv, env) = (texts(counts[1])?, texts(counts[2])?);
        let request = SpawnRequest { lease, programs, argv, env, cwd, pipe_stdin };
        Ok(Self { id, trusted_until, grace_ns, request })
    }
}

/// Sends an encoded launch with the child's ends of its pipes, or says that the socket is full.
pub(super) fn send_launch(
    to: impl AsFd,
    launch: &[u8],
    stdio: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let file;
    let mut descriptors = stdio.to_vec();
    let mut body = launch;
    if launch.len() > INLINE_BYTES {
        let mut long = File::from(memfd_create("launch", MemfdFlags::CLOEXEC)?);
        long.write_all(launch)?;
        file = long;
        descriptors.push(file.as_fd());
        body = &[];
    }
    let kind = [u8::from(body.is_empty())];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(&descriptors));
    let parts = [IoSlice::new(&kind), IoSlice::new(body)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(sendmsg(to, &parts, &mut rights, flags).map(drop)?)
}

/// Waits for the next launch and the descriptors that came with it; none when the other side has
/// gone.
pub(super) fn next_launch(
    from: impl AsFd,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<(Launch, Vec<OwnedFd>)>> {
    buffer.resize(1 + INLINE_BYTES, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match recvmsg(&from, &mut parts, &mut rights, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(those) = message {
            descriptors.extend(those);
        }
    }
    let bytes = &buffer[..received.bytes];
    let Some((&kind, body)) = bytes.split_first() else { return Ok(None) };
    let launch = if kind == 0 {
        Launch::decode(body)?
    } else {
        let file = File::from(descriptors.pop().ok_or_else(garbled)?);
        let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        if length > LAUNCH_BYTES {
            return Err(garbled());
        }
        let mut long = vec![0; length];
        file.read_exact_at(&mut long, 0)?;
        Launch::decode(&long)?
    };
    // No descriptors left in this process: the launch fails for want of them.
    let cut = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Some((launch, if cut { Vec::new() } else { descriptors })))
}

/// Bytes, read from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk().ok_or_else(garbled)?;
        self.0 = rest;
        Ok(*first)
    }

    fn byte(&mut self) -> io::Result<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn i32(&mut self) -> io::Result<i32> {
        self.take().map(i32::from_le_bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn u128(&mut self) -> io::Result<u128> {
        self.take().map(u128::from_le_bytes)
    }

    fn text(&mut self) -> io::Result<CString> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or_else(garbled)?;
        let (text, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        CString::new(text).map_err(|_| garbled())
    }
}

fn garbled() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message of no known shape")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn launch(argument: &str) -> Launch {
        let text = |text: &str| CString::new(text).unwrap();
        let request = SpawnRequest {
            lease: LeaseId::generate(),
            programs: [text("/bin/p"), text("p")].into(),
            argv: vec![text("p"), text(argument), text("")],
            env: vec![text("A=1")],
            cwd: text("/"),
            pipe_stdin: true,
        };
        Launch { id: 7, trusted_until: BootInstant::from_nanos(8), grace_ns: 9, request }
    }

    fn assert_same(one: &Launch, other: &Launch) {
        assert_eq!(format!("{one:?}"), format!("{other:?}"));
    }

    #[test]
    fn orders_and_reports_arrive_as_they_were_sent() {
        let (worker, keeper) = pair().unwrap();
        let orders = [
            Order::Extend(LeaseId::generate(), BootInstant::from_nanos(u64::MAX - 1)),
            Order::Terminate(u64::MAX),
            Order::End(1),
        ];
        for order in orders {
            send_order(&worker, order).unwrap();
            assert_eq!(next_order(&keeper).unwrap(), Some(order));
        }
        let reports = [
            Report::Started(1),
            Report::Failed(2, Failure::System(11)),
            Report::Failed(3, Failure::WorkingDirectory(2)),
            Report::Failed(4, Failure::Program(13)),
            Report::Failed(5, Failure::TooLate),
            Report::Exited(6),
            Report::Gone(7, Exit::Status(255)),
            Report::Gone(8, Exit::Signal(9)),
            Report::Gone(u64::MAX, Exit::Fenced),
        ];
        for report in reports {
            send_report(&keeper, report).unwrap();
            assert_eq!(next_report(&worker).unwrap(), Some(report));
        }
        assert_eq!(next_order(&keeper).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(worker);
        assert_eq!(next_order(&keeper).unwrap(), None);
    }

    #[test]
    fn launches_of_any_length_arrive_with_their_descriptors() {
        let (worker, keeper) = pair().unwrap();
        let mut buffer = Vec::new();
        for length in [0, 100, INLINE_BYTES, 3 * INLINE_BYTES] {
            let sent = launch(&"x".repeat(length));
            let (mut ours, theirs) = io::pipe().unwrap();
            send_launch(&worker, &sent.encode().unwrap(), &[theirs.as_fd()]).unwrap();
            drop(theirs);
            let (received, descriptors) = next_launch(&keeper, &mut buffer).unwrap().unwrap();

            assert_same(&received, &sent);
            assert_eq!(descriptors.len(), 1);
            for descriptor in descriptors {
                File::from(descriptor).write_all(b"through it").unwrap();
            }
            let mut text = String::new();
            ours.read_to_string(&mut text).unwrap();
            assert_eq!(text, "through it");
        }
        drop(worker);
        assert!(next_launch(&keeper, &mut buffer).unwrap().is_none());
    }

    #[test]
    fn what_no_kernel_takes_is_refused_before_it_is_sent() {
        let error = launch(&"x".repeat(LAUNCH_BYTES)).encode().unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::TOOBIG));
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic() {
        let whole = launch("argument").encode().unwrap();
        for length in 0..whole.len() {
            assert!(Launch::decode(&whole[..length]).is_err(), "{length}");
        }
        let mut lying = whole;
        lying[41..45].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Launch::decode(&lying).is_err());
        assert!(Order::decode(&[9; Order::BYTES]).is_err());
        assert!(Order::decode(&[1]).is_err());
        assert!(Report::decode(&[0; Report::BYTES]).is_err());
    }
}
