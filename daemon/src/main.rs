//! The `holdfast` binary: everything is in the library.

fn main() -> std::process::ExitCode {
    holdfast::cli::main()
}
