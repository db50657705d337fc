/* SPDX-License-Identifier: Apache-2.0 */
/*
 *   infiniswap-holder SPEC_FD READY_FD PROGRAM [ARGUMENT...]
 *
 * Runs `PROGRAM ARGUMENT... active` until it has ended in order, and, as long as that serves,
 * `PROGRAM ARGUMENT... standby` beside it. Exits as the device process does. See holder.h.
 *
 * PROGRAM is an absolute path and starts in `/`, with the environment that we got, which
 * infiniswap.system.programs has made: another user has prepared neither.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "holder/holder.h"
#include "util/util.h"

#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

#define ARGUMENTS_MAX 16
#define EXIT_USAGE    2
#define EXIT_NO_START 71
#define REAP_MS_MAX   5000
#define NS_PER_MS     1000000ull
#define POLL_MS_LONG  60000

/*
 * `infiniswap device show` names what the kernel refuses; it reads that back from /proc.
 *
 * No child of ours dumps core: it is dead only when that is done, and a program that takes cores
 * through a pipe may itself lie on the device, which is dead meanwhile. A limit of 0 does not keep
 * the kernel from pipes, 1 does (fs/coredump.c).
 *
 * We and they have no CAP_IPC_LOCK (infiniswap.rights.device_capabilities): the limit allows it.
 */
static void make_safe(void)
{
	const struct rlimit no_core = {.rlim_cur = 1, .rlim_max = 1};
	const struct rlimit all = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd >= 0) {
		if (write(fd, "-1000", 5) < 0) {
			/* The same: read back. */
		}
		close(fd);
	}
	(void)setrlimit(RLIMIT_CORE, &no_core);
	(void)setrlimit(RLIMIT_MEMLOCK, &all);
	prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
	mlockall(MCL_CURRENT | MCL_FUTURE);
}

/* Out of the way of the numbers that children get; -1 for a number that is no descriptor. */
static int take_descriptor(const char *text)
{
	int moved = fcntl(atoi(text), F_DUPFD_CLOEXEC, ISWI_HOLD_READY_FD + 1);

	if (moved >= 0)
		close(atoi(text));
	return moved;
}

static int open_signals(void)
{
	sigset_t wanted, all;
	int fd, moved;

	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	sigemptyset(&wanted);
	sigaddset(&wanted, SIGCHLD);
	sigaddset(&wanted, SIGTERM);
	sigaddset(&wanted, SIGINT);
	fd = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
	if (fd < 0)
		return -1;
	moved = fcntl(fd, F_DUPFD_CLOEXEC, ISWI_HOLD_READY_FD + 1);
	close(fd);
	return moved;
}

static void take_signals(struct iswi_holder *holder, int fd)
{
	struct signalfd_siginfo info;

	while (read(fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
		if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
			iswi_roles_signal(holder, (int)info.ssi_signo);
}

static void reap(struct iswi_holder *holder)
{
	siginfo_t info = {.si_pid = 0};

	/* Several deaths may be one SIGCHLD. Reaped last: until then no other process gets the pid.
	 */
	while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid > 0) {
		iswi_roles_died(holder, info.si_pid, info.si_code != CLD_EXITED, info.si_status);
		waitpid(info.si_pid, NULL, WNOHANG);
		info.si_pid = 0;
	}
}

static void run(struct iswi_holder *holder, int signals)
{
	while (holder->phase != ISWI_HOLD_DONE) {
		uint64_t left_ns = iswi_roles_step(holder);
		int wait_ms = (int)ISWI_MIN(left_ns / NS_PER_MS + 1, (uint64_t)POLL_MS_LONG);
		/* Read after the step, which may start and end some; -1 is passed over. */
		struct pollfd fds[] = {
			{.fd = signals, .events = POLLIN},
			{.fd = holder->active.sock, .events = POLLIN},
			{.fd = holder->standby.sock, .events = POLLIN},
			{.fd = holder->fresh.sock, .events = POLLIN},
		};

		(void)poll(fds, ISWI_ARRAY_LEN(fds), wait_ms);
		take_signals(holder, signals);
		iswi_roles_hear(holder);
		reap(holder);
	}
}

/* They are killed already; none of them may outlive us. */
static void reap_rest(int signals)
{
	uint64_t until = iswi_now_ns() + REAP_MS_MAX * NS_PER_MS;

	while (iswi_now_ns() < until) {
		struct pollfd pollfd = {.fd = signals, .events = POLLIN};
		struct signalfd_siginfo info;
		pid_t pid;

		while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
			;
		if (pid < 0)
			return;
		(void)poll(&pollfd, 1, 100);
		if (read(signals, &info, sizeof(info)) < 0) {
			/* Nothing came. */
		}
	}
}

static int usage(void)
{
	fputs("usage: infiniswap-holder SPEC_FD READY_FD PROGRAM [ARGUMENT...]\n"
	      "It is started by `infiniswap device start`, not by hand.\n",
	      stderr);
	return EXIT_USAGE;
}

int main(int argc, char **argv)
{
	static struct iswi_holder holder;
	static char active[] = "active", standby[] = "standby";
	char *first[ARGUMENTS_MAX + 2] = {NULL}, *others[ARGUMENTS_MAX + 2] = {NULL};
	int count = argc - 3, signals, err;

	if (count < 1 || count > ARGUMENTS_MAX || argv[3][0] != '/' || chdir("/") != 0)
		return usage();
	memcpy(first, argv + 3, (size_t)count * sizeof(*first));
	memcpy(others, argv + 3, (size_t)count * sizeof(*others));
	first[count] = active;
	others[count] = standby;
	holder.first =
		(struct iswi_spawn){first, take_descriptor(argv[1]), take_descriptor(argv[2])};
	holder.others = (struct iswi_spawn){others, holder.first.spec_fd, -1};
	signals = open_signals();
	if (holder.first.spec_fd < 0 || holder.first.ready_fd < 0 || signals < 0)
		return usage();
	make_safe();
	err = iswi_roles_start(&holder);
	if (err) {
		fprintf(stderr, "infiniswap-holder: cannot start %s: %s\n", first[0],
			strerror(-err));
		return EXIT_NO_START;
	}
	close(holder.first.ready_fd);
	run(&holder, signals);
	reap_rest(signals);
	return holder.exit_code;
}
