//! Files of this machine, read with a cap and written without harm.
//!
//! A path may lead to anything. Only regular files are read, beside what a shell hands over as a stream, which must end
//! in time. What is written goes to a regular file as a whole or not at all, and never takes the place of something else.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// How long a stream may take to end.
const STREAM_ENDS_IN: Duration = Duration::from_secs(10);

/// The bytes of a file, unless there are more than `most`; `-` is the standard input.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let path = if path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    let too_long = || {
        let problem = format!("it is longer than {most} bytes, the most that such a file may have");
        Error::new(ErrorKind::FileTooLarge, problem)
    };
    let bytes = if is_stream(path) && !std::fs::metadata(path)?.is_file() {
        in_time(File::open(path)?, most)?
    } else {
        let file = open(path)?;
        // What says its length need not be read to be refused.
        if file.metadata()?.len() > most {
            return Err(too_long());
        }
        capped(file, most)?
    };
    if bytes.len() as u64 > most { Err(too_long()) } else { Ok(bytes) }
}

/// The text of a file, unless it is longer than `most` bytes.
pub(crate) fn text(path: &Path, most: u64) -> Result<String, Error> {
    String::from_utf8(read(path, most)?).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// The first bytes of a regular file, at most so many.
pub(crate) fn head(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    capped(open(path)?, most.saturating_sub(1))
}

/// Opens a regular file.
pub(crate) fn open(path: &Path) -> Result<File, Error> {
    // Asked before it is opened: opening a pipe waits for whoever writes into it.
    match refusal(&std::fs::metadata(path)?) {
        Some(what) => Err(Error::new(ErrorKind::InvalidInput, format!("it is {what}, not a file"))),
        None => File::open(path),
    }
}

/// Writes a file: all of it or nothing. Links are followed; what is read-only stays.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let refuse = |problem: &str| Err(Error::new(ErrorKind::InvalidInput, problem.to_owned()));
    let there = match std::fs::metadata(path) {
        Ok(there) => Some(there),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    match &there {
        None if path.symlink_metadata().is_ok() => return refuse("it is a link to nothing; remove it first"),
        Some(there) if there.is_file() && there.permissions().readonly() => {
            return refuse("it is read-only; choose another name or make it writable");
        }
        // What stands for a stream or swallows all takes bytes as they come.
        Some(there) if is_stream(path) || is_character_device(there) => {
            let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
            if !there.is_file() {
                return file.write_all(bytes);
            }
        }
        Some(there) => {
            if let Some(what) = refusal(there) {
                return refuse(&format!("it is {what}, not a file"));
            }
        }
        None => {}
    }
    let target = if there.is_some() { path.canonicalize()? } else { path.to_owned() };
    beside(&target, there.as_ref(), bytes)
}

/// Whether lines can be added to a file: one that is there and writable, or one in a folder that is there.
pub(crate) fn appendable(path: &Path) -> Result<(), Error> {
    let refuse = |problem: &str| Err(Error::new(ErrorKind::InvalidInput, problem.to_owned()));
    match std::fs::metadata(path) {
        Ok(there) => match refusal(&there) {
            Some(what) => refuse(&format!("it is {what}, not a file")),
            None if there.permissions().readonly() => {
                refuse("it is read-only; choose another name or make it writable")
            }
            None => Ok(()),
        },
        Err(error) if error.kind() == ErrorKind::NotFound && path.symlink_metadata().is_ok() => {
            refuse("it is a link to nothing; remove it first")
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            match folder.filter(|folder| !folder.is_dir()) {
                Some(folder) => refuse(&format!("there is no folder {}", folder.display())),
                None => Ok(()),
            }
        }
        Err(error) => Err(error),
    }
}

/// Adds text to a file, all at once.
pub(crate) fn append(path: &Path, text: &str) -> Result<(), Error> {
    appendable(path)?;
    std::fs::OpenOptions::new().create(true).append(true).open(path)?.write_all(text.as_bytes())
}

/// Written beside its place and moved over, so that no half file is left.
fn beside(target: &Path, there: Option<&Metadata>, bytes: &[u8]) -> Result<(), Error> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder: PathBuf = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
    let mut builder = tempfile::Builder::new();
    builder.prefix(".vramcast-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(&folder).map_err(|error| Error::new(error.kind(), plain(&error)))?;
    file.write_all(bytes)?;
    if let Some(there) = there {
        file.as_file().set_permissions(there.permissions())?;
    }
    file.persist(target).map_err(|failed| failed.error)?;
    Ok(())
}

/// The system's words without the name of the file that was to be made.
fn plain(error: &Error) -> String {
    let text = error.to_string();
    text.split(" at path").next().unwrap_or(&text).to_owned()
}

/// What a shell hands over: the standard input, or a pipe from `<(command)`.
pub(crate) fn is_stream(path: &Path) -> bool {
    ["/dev/stdin", "/dev/stdout", "/dev/stderr"].iter().any(|name| path == Path::new(name))
        || path.starts_with("/dev/fd")
        || path.starts_with("/proc/self/fd")
}

/// At most one byte more than `most`, into as much room as the file says it needs.
fn capped(file: File, most: u64) -> Result<Vec<u8>, Error> {
    let length = file.metadata().map_or(0, |there| there.len()).min(most);
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default() + 1);
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a stream on a thread of its own, which is left behind when it does not end.
fn in_time(file: File, most: u64) -> Result<Vec<u8>, Error> {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(capped(file, most)));
    wait.recv_timeout(STREAM_ENDS_IN).unwrap_or_else(|_| {
        let problem = format!("the stream did not end within {} s", STREAM_ENDS_IN.as_secs());
        Err(Error::new(ErrorKind::TimedOut, problem))
    })
}

/// What something is that is no regular file.
fn refusal(there: &Metadata) -> Option<&'static str> {
    if there.is_file() {
        return None;
    }
    if there.is_dir() {
        return Some("a folder");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = there.file_type();
        if kind.is_fifo() {
            return Some("a named pipe");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
    }
    Some("a device")
}

fn is_character_device(there: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        there.file_type().is_char_device()
    }
    #[cfg(not(unix))]
    {
        let _ = there;
        false
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let said = |path: &Path| read(path, 8).unwrap_err().to_string();
        assert!(said(Path::new("/dev/zero")).contains("a device"));
        assert!(said(folder.path()).contains("a folder"));
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(said(&pipe).contains("a named pipe"));
        assert!(write(&pipe, b"x").unwrap_err().to_string().contains("a named pipe"));
        let file = folder.path().join("file");
        std::fs::write(&file, "123456789").unwrap();
        assert!(said(&file).contains("longer than 8 bytes"));
        assert_eq!(read(&file, 9).unwrap(), b"123456789");
    }

    #[test]
    fn nothing_is_put_in_the_place_of_something_else() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, dangling] = ["file", "link", "dangling"].map(|name| folder.path().join(name));
        write(&file, b"one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::os::unix::fs::symlink(folder.path().join("nothing"), &dangling).unwrap();
        write(&link, b"two").unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        assert!(write(&dangling, b"x").unwrap_err().to_string().contains("a link to nothing"));
        let mut permissions = std::fs::metadata(&file).unwrap().permissions();
        permissions.set_readonly(true);
        std::fs::set_permissions(&file, permissions).unwrap();
        assert!(write(&file, b"x").unwrap_err().to_string().contains("read-only"));
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        write(Path::new("/dev/null"), b"x").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
        assert!(write(Path::new("/dev/full"), b"x").is_err());
        // Lines are added to files alone.
        assert!(append(&file, "x").unwrap_err().to_string().contains("read-only"));
        assert!(append(&dangling, "x").unwrap_err().to_string().contains("a link to nothing"));
        assert!(append(Path::new("/dev/null"), "x").unwrap_err().to_string().contains("a device"));
        assert!(appendable(&folder.path().join("no/file")).unwrap_err().to_string().contains("no folder"));
        let more = tempfile::NamedTempFile::new().unwrap();
        append(more.path(), "one\n").unwrap();
        append(more.path(), "two\n").unwrap();
        assert_eq!(std::fs::read(more.path()).unwrap(), b"one\ntwo\n");
        // No half file stays behind.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
