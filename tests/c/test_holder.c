// SPDX-License-Identifier: Apache-2.0
/*
 * The holder with toy children: it starts this program again, as the device's process and as
 * standby, with the mode that the test names.
 */
#define _GNU_SOURCE 1
#define OWN_MAIN
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "holder/holder.h"
#include "holder_fixture.h"

#define ALONE_S_MAX 240

/* ------------------------------------------------------------------ toy children */

static void say_with(const char *text, int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec part = {.iov_base = (void *)text, .iov_len = strlen(text)};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (fd >= 0) {
		struct cmsghdr *head;

		message.msg_control = control.bytes;
		message.msg_controllen = sizeof(control.bytes);
		head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(head), &fd, sizeof(int));
	}
	CHECK(sendmsg(ISWI_HOLD_SOCKET_FD, &message, MSG_NOSIGNAL) > 0);
}

static void say(const char *text)
{
	say_with(text, -1);
}

/* Returns how many descriptors came along; 0 bytes of text at the end of the holder. */
static uint32_t hear(char *text_out, size_t bytes, int *fds_out)
{
	union {
		char bytes[CMSG_SPACE(ISWI_HOLD_KEPT_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = {.iov_base = text_out, .iov_len = bytes - 1};
	struct msghdr message = {.msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = control.bytes,
				 .msg_controllen = sizeof(control.bytes)};
	ssize_t got = recvmsg(ISWI_HOLD_SOCKET_FD, &message, 0);
	struct cmsghdr *head = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
	uint32_t count = 0;

	text_out[got > 0 ? got : 0] = '\0';
	if (head) {
		count = (uint32_t)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(fds_out, CMSG_DATA(head), count * sizeof(int));
	}
	return count;
}

/* The test's pipe, which every child inherits as its standard output. */
static void report(const char *text)
{
	char line[256];

	snprintf(line, sizeof(line), "%d %s\n", (int)getpid(), text);
	CHECK(write(STDOUT_FILENO, line, strlen(line)) == (ssize_t)strlen(line));
}

static int memory_file(const char *content)
{
	int fd = memfd_create("toy", MFD_CLOEXEC);

	CHECK(fd >= 0);
	CHECK_EQ(pwrite(fd, content, strlen(content), 0), strlen(content));
	return fd;
}

/*
 * In place of an io_uring a file that is locked as long as somebody has the open file. Where it is,
 * the test says in the environment.
 */
#define RING "ISW_TEST_RING"

static bool lock_ring(int *fd_out)
{
	*fd_out = open(getenv(RING), O_RDWR | O_CLOEXEC);
	CHECK(*fd_out >= 0);
	if (flock(*fd_out, LOCK_EX | LOCK_NB) == 0)
		return true;
	CHECK_EQ(errno, EWOULDBLOCK);
	close(*fd_out);
	return false;
}

static void say_ring(int fd)
{
	char text[32];

	snprintf(text, sizeof(text), "ring %d", fd);
	say(text);
}

/* A path by which this program is started again, as code of another version. */
#define PROGRAM "ISW_TEST_PROGRAM"

static void say_renew(void)
{
	char text[256];

	snprintf(text, sizeof(text), "renew %s", getenv(PROGRAM));
	say(text);
}

/* Serves until it is killed; on SIGTERM it ends as it should. */
static volatile sig_atomic_t asked_to_end;

static void on_term(int number)
{
	(void)number;
	asked_to_end = 1;
}

static int serve(const char *mode)
{
	char text[ISWI_HOLD_TEXT_MAX];
	int fds[ISWI_HOLD_KEPT_MAX];
	struct sigaction action = {.sa_handler = on_term};
	sigset_t blocked, none;

	/* Only while it waits, or one that comes just before would be slept over. */
	sigemptyset(&none);
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGTERM);
	sigprocmask(SIG_BLOCK, &blocked, NULL);
	sigaction(SIGTERM, &action, NULL);
	report("serving");
	say("serving");
	if (strcmp(mode, "renew") == 0)
		say("renew");
	while (!asked_to_end) {
		struct pollfd pollfd = {.fd = ISWI_HOLD_SOCKET_FD, .events = POLLIN};

		if (ppoll(&pollfd, 1, NULL, &none) != 1) {
			if (asked_to_end && strcmp(mode, "goes-on") == 0) {
				asked_to_end = 0;
				say("serving");
				report("goes on");
			}
			continue;
		}
		hear(text, sizeof(text), fds);
		if (text[0] == '\0') {
			report("alone");
			while (!asked_to_end)
				sigsuspend(&none);
			return 0;
		}
		report(text);
		if (strcmp(text, "renewed") == 0)
			say("yield");
		/* Not sooner: which of the two the holder would do first is not known. */
		if (strcmp(text, "standby ready") == 0 && strcmp(mode, "renew-program") == 0) {
			say_renew();
			mode = "serves";
		}
	}
	say("ending");
	say("ended 7");
	return 7;
}

/* Until the test has removed this file the device is not served yet. */
#define GATE "ISW_TEST_GATE"

static int active(const char *mode)
{
	int state;

	CHECK(fcntl(ISWI_HOLD_SPEC_FD, F_GETFD) >= 0);
	CHECK(fcntl(ISWI_HOLD_READY_FD, F_GETFD) >= 0);
	if (strcmp(mode, "fails") == 0)
		return 9;
	state = memory_file("state of the device");
	say_with("keep state", state);
	close(state);
	say_with("keep key", memory_file("key"));
	say_with("keep spec", memory_file("spec"));
	say_with("keep fuse", memory_file("connection"));
	say_with("keep gone", memory_file("nobody wants it"));
	say("drop gone");
	if (strcmp(mode, "rings") == 0) {
		int ring;

		CHECK(lock_ring(&ring));
		say_ring(ring);
	} else if (strcmp(mode, "no-ring") == 0) {
		say_ring(1000);
	}
	if (getenv(GATE))
		while (access(getenv(GATE), F_OK) == 0)
			(void)poll(NULL, 0, 1);
	if (strcmp(mode, "no-successor") == 0) {
		close(ISWI_HOLD_SOCKET_FD);
		pause();
	}
	return serve(mode);
}

static void check_handed(const char *names, const int *fds, uint32_t count)
{
	char content[64] = {0};

	CHECK_EQ(count, 4);
	CHECK(strcmp(names, "state,key,spec,fuse") == 0);
	CHECK(pread(fds[0], content, sizeof(content) - 1, 0) > 0);
	CHECK(strcmp(content, "state of the device") == 0);
	memset(content, 0, sizeof(content));
	CHECK(pread(fds[3], content, sizeof(content) - 1, 0) > 0);
	CHECK(strcmp(content, "connection") == 0);
}

static int standby(const char *mode)
{
	char text[ISWI_HOLD_TEXT_MAX], reason[32], names[256], line[128];
	unsigned long long count, died_ns;
	int fds[ISWI_HOLD_KEPT_MAX];

	CHECK(fcntl(ISWI_HOLD_READY_FD, F_GETFD) < 0);
	report("waits");
	CHECK_EQ(hear(text, sizeof(text), fds), 3);
	CHECK(strcmp(text, "prepare state,key,spec") == 0);
	if (getenv(PROGRAM) && strcmp(program_invocation_name, getenv(PROGRAM)) == 0)
		report("runs the other program");
	if (strcmp(mode, "refuses") == 0) {
		say("refused it is of another version");
		return 3;
	}
	if (strcmp(mode, "nothing-left") == 0) {
		/* The holder hears it when it has seen whether the one that serves is dead. */
		report("nothing left");
		raise(SIGSTOP);
		say("hopeless nothing is left");
		pause();
	}
	report("standby");
	say("standby");
	{
		uint32_t handed = hear(text, sizeof(text), fds);

		if (text[0] == '\0')
			return 0; /* the holder has gone */
		CHECK_EQ(sscanf(text, "take-over %llu %llu %31s %255s", &count, &died_ns, reason,
				names),
			 4);
		check_handed(names, fds, handed);
	}
	snprintf(line, sizeof(line), "take-over %llu %s", count, reason);
	report(line);
	if (strcmp(mode, "hopeless") == 0) {
		say("hopeless the state is damaged");
		return 5;
	}
	if (strcmp(mode, "dies-once") == 0 && count == 1)
		abort();
	if (strcmp(mode, "rings") == 0) {
		int ring;

		report(lock_ring(&ring) ? "its ring is gone" : "its ring is there");
	}
	return serve("serves");
}

/* -------------------------------------------------------------------------- tests */

NAMED_TEST(an_orderly_end_ends_all)
{
	start_with_standby("serves");
	stop();
	CHECK(kill(held.waiting, 0) != 0 && errno == ESRCH);
}

/* The sanitizers' runtimes make mlock() do nothing. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool locks = false;
#else
static const bool locks = true;
#endif

/* How many files in memory a process has mapped, locked, and keeps out of core files. */
static unsigned int locked_files(pid_t pid)
{
	unsigned int found = 0, kib;
	bool is_memory = false, is_locked = false;
	char path[32], line[512];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/smaps", (int)pid);
	file = fopen(path, "r");
	CHECK(file != NULL);
	while (fgets(line, sizeof(line), file)) {
		if (strstr(line, "-s ") || strstr(line, "-p "))
			is_memory = strstr(line, "/memfd:") != NULL;
		if (sscanf(line, "Locked: %u", &kib) == 1)
			is_locked = kib > 0 || !locks;
		if (strncmp(line, "VmFlags:", 8) == 0)
			found += is_memory && is_locked && strstr(line, " dd") != NULL;
	}
	fclose(file);
	return found;
}

/* Else a successor would have to wait for what it reads before it serves. */
STANDBY_TEST(what_a_successor_reads_stays_in_memory, "serves")
{
	CHECK_EQ(locked_files(held.pid), 3); /* of five that it was given: state, key and spec */
	signal_to(held.serving, SIGKILL);
	expect("take-over 1 killed");
	CHECK_EQ(locked_files(held.pid), 3);
	expect("serving");
}

static char gate[] = "/tmp/isw-test-gate-XXXXXX";

/* The first process is started up to where it serves, and its standby waits: returns that. */
static pid_t start_halfway(const char *mode)
{
	int fd;

	memcpy(gate + sizeof(gate) - 7, "XXXXXX", 6);
	fd = mkstemp(gate);
	CHECK(fd >= 0);
	close(fd);
	setenv(GATE, gate, 1);
	start_holder(mode);
	return expect("waits");
}

/* Later it would take processor time from what the device serves. */
NAMED_TEST(the_first_standby_starts_beside_the_first_process)
{
	pid_t waiting = start_halfway("serves");

	CHECK_EQ(unlink(gate), 0);
	held.serving = expect("serving");
	CHECK_EQ(expect("standby"), waiting);
	signal_to(held.serving, SIGKILL);
	CHECK_EQ(expect("take-over 1 killed"), waiting);
	expect("serving");
	stop();
}

NAMED_TEST(a_standby_that_dies_before_the_device_is_served_is_replaced)
{
	pid_t waiting = start_halfway("serves");

	signal_to(waiting, SIGKILL);
	CHECK(expect("waits") != waiting);
	CHECK_EQ(unlink(gate), 0);
	held.serving = expect("serving");
	expect("standby");
	stop();
}

NAMED_TEST(a_process_that_nobody_could_follow_has_no_standby)
{
	pid_t waiting = start_halfway("no-successor");
	struct pollfd report = {.fd = fileno(held.reports), .events = POLLIN};

	CHECK_EQ(unlink(gate), 0);
	await_gone(waiting);
	CHECK_EQ(poll(&report, 1, 300), 0); /* there is not another one */
	signal_to(held.pid, SIGTERM);
	CHECK_EQ(exit_code(), 128 + SIGTERM);
}

NAMED_TEST(a_start_that_fails_is_the_end)
{
	start_holder("fails");
	CHECK_EQ(exit_code(), 9);
}

SERVING_TEST(each_death_is_followed_by_a_take_over, "serves")
{
	for (int i = 1; i <= 5; i++) {
		pid_t waiting = expect("standby");
		char text[32];

		signal_to(held.serving, SIGKILL);
		snprintf(text, sizeof(text), "take-over %d killed", i);
		held.serving = expect(text);
		CHECK_EQ(held.serving, waiting);
		expect("serving");
	}
}

STANDBY_TEST(a_standby_that_dies_is_replaced, "serves")
{
	expect("standby ready");
	signal_to(held.waiting, SIGKILL);
	CHECK_EQ(expect("it has died; another one is started"), held.serving);
	CHECK(expect("standby") != held.waiting);
}

STANDBY_TEST(both_killed_at_once_a_new_one_takes_over, "serves")
{
	pid_t next;

	/* The holder finds both dead. */
	signal_to(held.pid, SIGSTOP);
	signal_to(held.waiting, SIGKILL);
	signal_to(held.serving, SIGKILL);
	signal_to(held.pid, SIGCONT);
	next = expect("standby");
	CHECK(next != held.waiting);
	/* The first when it has seen both deaths, else it has tried the dead one before. */
	CHECK_EQ(expect(" killed"), next);
	expect("serving");
}

NAMED_TEST(a_signal_while_nobody_serves_is_not_forgotten)
{
	start_with_standby("serves");
	signal_to(held.waiting, SIGSTOP);
	signal_to(held.serving, SIGKILL);
	/* Told to take over, and not able to: that is when it comes. */
	await_gone(held.serving);
	signal_to(held.pid, SIGTERM);
	signal_to(held.waiting, SIGCONT);
	CHECK_EQ(exit_code(), 7);
}

NAMED_TEST(a_signal_that_comes_with_a_death_is_not_forgotten)
{
	start_with_standby("serves");
	/* The holder finds both at once, and who is to get the signal dead. */
	signal_to(held.pid, SIGSTOP);
	signal_to(held.serving, SIGKILL);
	await_state(held.serving, 'Z');
	signal_to(held.pid, SIGTERM);
	signal_to(held.pid, SIGCONT);
	CHECK_EQ(exit_code(), 7);
}

STANDBY_TEST(a_signal_that_was_answered_is_over, "goes-on")
{
	signal_to(held.pid, SIGTERM);
	CHECK_EQ(expect("goes on"), held.serving);
	signal_to(held.serving, SIGKILL);
	held.serving = expect("take-over 1 killed");
	/* Time enough to be asked, were it asked as well. */
	CHECK_EQ(expect("standby ready"), held.serving);
	signal_to(held.serving, SIGKILL);
	expect("take-over 2 killed");
	expect("serving");
}

STANDBY_TEST(who_dies_while_taking_over_is_followed_by_the_next, "dies-once")
{
	signal_to(held.serving, SIGKILL);
	held.serving = expect("take-over 1 killed");
	CHECK(expect("take-over 2 killed") != held.serving);
	expect("serving");
}

NAMED_TEST(a_ring_ends_when_its_process_is_seen_to_have_ended)
{
	char path[] = "/tmp/isw-holder-XXXXXX";
	int fd = mkstemp(path);

	CHECK(fd >= 0);
	CHECK(setenv(RING, path, 1) == 0);
	start_with_standby("rings");
	signal_to(held.pid, SIGSTOP);
	signal_to(held.serving, SIGKILL);
	await_state(held.serving, 'Z');
	CHECK(flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK);
	signal_to(held.pid, SIGCONT);
	expect("its ring is gone");
	expect("serving");
	close(fd);
	unlink(path);
	stop();
}

SERVING_TEST(a_ring_that_cannot_be_held_is_told, "no-ring")
{
	expect("unheld Bad file descriptor");
	expect("standby ready");
}

SERVING_TEST(what_cannot_take_over_says_why, "refuses")
{
	CHECK_EQ(expect("standby none it is of another version"), held.serving);
}

NAMED_TEST(a_hopeless_device_ends)
{
	start_with_standby("hopeless");
	signal_to(held.serving, SIGKILL);
	CHECK_EQ(exit_code(), 5);
}

NAMED_TEST(a_standby_that_finds_nothing_is_the_end_when_nobody_serves)
{
	pid_t waiting;

	start_serving("nothing-left");
	waiting = expect("nothing left");
	await_state(waiting, 'T');
	signal_to(held.serving, SIGKILL);
	await_gone(held.serving);
	signal_to(waiting, SIGCONT);
	CHECK_EQ(exit_code(), 1);
	CHECK(kill(waiting, 0) != 0 && errno == ESRCH);
}

SERVING_TEST(a_standby_that_finds_nothing_is_not_believed_meanwhile, "nothing-left")
{
	pid_t waiting = expect("nothing left");

	await_state(waiting, 'T');
	signal_to(waiting, SIGCONT);
	CHECK_EQ(expect("standby none nothing is left"), held.serving);
}

SERVING_TEST(a_restart_is_a_new_standby_and_a_death, "renew")
{
	CHECK(expect("take-over 1 restart") != held.serving);
	expect("serving");
}

NAMED_TEST(a_restart_changes_the_program_of_all_later_standbys)
{
	char path[] = "/tmp/isw-holder-XXXXXX", self[512];
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
	int fd = mkstemp(path);

	CHECK(fd >= 0 && length > 0);
	self[length] = '\0';
	close(fd);
	CHECK(unlink(path) == 0 && symlink(self, path) == 0);
	CHECK(setenv(PROGRAM, path, 1) == 0);
	start_with_standby("renew-program");
	expect("runs the other program");
	held.serving = expect("take-over 1 restart");
	held.waiting = expect("runs the other program");
	expect("standby");
	signal_to(held.serving, SIGKILL);
	CHECK_EQ(expect("take-over 2 killed"), held.waiting);
	held.serving = held.waiting;
	expect("runs the other program");
	unlink(path);
	stop();
}

static void cannot_be_renewed_with(const char *program, const char *answer)
{
	CHECK(setenv(PROGRAM, program, 1) == 0);
	start_with_standby("renew-program");
	expect(answer);
	signal_to(held.serving, SIGKILL);
	held.serving = expect("take-over 1 killed");
	CHECK_EQ(held.serving, held.waiting);
	/* The former program is kept. */
	expect("standby");
	stop();
}

NAMED_TEST(a_program_that_is_not_there_changes_nothing)
{
	cannot_be_renewed_with("/nonexistent", "refused its process could not be started");
}

NAMED_TEST(a_program_without_an_absolute_path_changes_nothing)
{
	cannot_be_renewed_with("true", "refused its program has no path that can be used");
}

NAMED_TEST(who_serves_outlives_the_holder)
{
	start_with_standby("serves");
	signal_to(held.pid, SIGKILL);
	CHECK_EQ(expect("alone"), held.serving);
	CHECK(kill(held.serving, 0) == 0);
	/* The pipe's end is the end of both; the standby goes by itself. */
	await_gone(held.waiting);
	signal_to(held.serving, SIGTERM);
	CHECK_EQ(exit_code(), 128 + SIGKILL);
}

static void refuses(const char *program)
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (pid == 0) {
		execl(ISW_HOLDER_PROGRAM, "infiniswap-holder", program ? "0" : NULL, "1", program,
		      NULL);
		_exit(99);
	}
	status = end_of(pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 2);
}

NAMED_TEST(wrong_arguments_are_told)
{
	refuses(NULL);
}

/* Or somebody who has prepared the directory that we are in could say what runs. */
NAMED_TEST(a_program_without_an_absolute_path_is_not_started)
{
	refuses("true");
	refuses("./true");
}

NAMED_TEST(programs_start_in_the_root_directory)
{
	pid_t pids[2];

	CHECK(chdir("/tmp") == 0);
	start_with_standby("serves");
	pids[0] = held.serving;
	pids[1] = held.waiting;
	for (size_t i = 0; i < 2; i++) {
		char path[64], cwd[64] = "";

		snprintf(path, sizeof(path), "/proc/%d/cwd", (int)pids[i]);
		CHECK(readlink(path, cwd, sizeof(cwd) - 1) > 0);
		CHECK_EQ(strcmp(cwd, "/"), 0);
	}
	stop();
}

int main(int argc, char **argv)
{
	if (argc == 3) {
		alarm(ALONE_S_MAX);
		return strcmp(argv[2], "active") == 0 ? active(argv[1]) : standby(argv[1]);
	}
	return run_tests();
}
