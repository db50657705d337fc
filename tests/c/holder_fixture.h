/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A holder with children of the test's: the test program itself, started again with a mode and
 * `active` or `standby` as arguments. They report lines on their standard output.
 */
#ifndef HOLDER_FIXTURE_H
#define HOLDER_FIXTURE_H

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "tests_between.h"

#define WAIT_MS 60000

static struct held {
	pid_t pid;
	pid_t serving, waiting; /* who is the active process, and the standby, at first */
	FILE *reports;
	char line[256];
} held;

static inline void start_holder(const char *mode)
{
	static char spec_fd[12], ready_fd[12], self[512];
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
	int pipes[2], spec = memfd_create("spec", 0), ready = memfd_create("ready", 0);

	CHECK(length > 0);
	CHECK(pipe(pipes) == 0);
	snprintf(spec_fd, sizeof(spec_fd), "%d", spec);
	snprintf(ready_fd, sizeof(ready_fd), "%d", ready);
	held.pid = fork();
	CHECK(held.pid >= 0);
	if (held.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nobody */
		dup2(pipes[1], STDOUT_FILENO);
		close(pipes[0]);
		close(pipes[1]);
		execl(ISW_HOLDER_PROGRAM, "infiniswap-holder", spec_fd, ready_fd, self, mode, NULL);
		_exit(99);
	}
	close(pipes[1]);
	close(spec);
	close(ready);
	held.reports = fdopen(pipes[0], "r");
	CHECK(held.reports != NULL);
	/* What poll() says is what there is. */
	setvbuf(held.reports, NULL, _IONBF, 0);
}

/* Waits for a report that ends with this text; returns who made it. */
static inline pid_t expect(const char *text)
{
	for (;;) {
		struct pollfd pollfd = {.fd = fileno(held.reports), .events = POLLIN};
		size_t length;

		CHECK(poll(&pollfd, 1, WAIT_MS) == 1);
		if (!fgets(held.line, sizeof(held.line), held.reports)) {
			fprintf(stderr, "no report of %s\n", text);
			exit(1);
		}
		held.line[strcspn(held.line, "\n")] = '\0';
		length = strlen(held.line);
		if (length > strlen(text) && strcmp(held.line + length - strlen(text), text) == 0)
			return (pid_t)atoi(held.line);
	}
}

/* What somebody who waits for it in vain wants to know of a process. */
static inline void show(pid_t pid, const char *name)
{
	char path[64], text[4096];
	FILE *file;
	size_t got;

	snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
	file = fopen(path, "r");
	if (!file)
		return;
	got = fread(text, 1, sizeof(text) - 1, file);
	text[got] = '\0';
	fprintf(stderr, "%s:\n%s\n", path, text);
	fclose(file);
}

static inline void show_all(pid_t parent)
{
	char path[64], text[1024] = {0};
	FILE *file;

	show(parent, "status");
	show(parent, "stack");
	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)parent, (int)parent);
	file = fopen(path, "r");
	if (file && fgets(text, sizeof(text), file))
		for (char *next = strtok(text, " "); next; next = strtok(NULL, " "))
			show_all((pid_t)atoi(next));
	if (file)
		fclose(file);
}

/* Returns its status; a process that does not end fails the test and is shown. */
static inline int end_of(pid_t pid)
{
	int status;

	for (int i = 0; i < WAIT_MS; i++) {
		pid_t ended = waitpid(pid, &status, WNOHANG);

		CHECK(ended >= 0);
		if (ended == pid)
			return status;
		(void)poll(NULL, 0, 1);
	}
	show_all(pid);
	CHECK(!"has ended");
	return 0;
}

/* As end_of(), for one that somebody else waits for. */
static inline void await_gone(pid_t pid)
{
	for (int i = 0; i < WAIT_MS && kill(pid, 0) == 0; i++)
		(void)poll(NULL, 0, 1);
	if (kill(pid, 0) == 0) {
		show_all(pid);
		CHECK(!"has gone");
	}
}

static inline int exit_code(void)
{
	int status = end_of(held.pid);

	fclose(held.reports);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* 'T': stopped; 'Z': all of it has ended, but for its being waited for. */
static inline bool is_in_state(pid_t pid, char wanted)
{
	char path[32], state = '?';
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	file = fopen(path, "r");
	CHECK(file != NULL);
	CHECK_EQ(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
	fclose(file);
	return state == wanted;
}

static inline void await_state(pid_t pid, char wanted)
{
	while (!is_in_state(pid, wanted))
		(void)poll(NULL, 0, 1);
}

/* A device that serves; its standby may be getting ready. */
static inline void start_serving(const char *mode)
{
	start_holder(mode);
	held.serving = expect("serving");
}

/* A device that serves, and a standby that waits. */
static inline void start_with_standby(const char *mode)
{
	start_serving(mode);
	held.waiting = expect("standby");
}

static inline void signal_to(pid_t pid, int number)
{
	CHECK(kill(pid, number) == 0);
}

/* The orderly end: whoever serves is asked to, and says with which code. */
static inline void stop(void)
{
	signal_to(held.pid, SIGTERM);
	CHECK_EQ(exit_code(), 7);
}

/* Says which it is: a test that hangs is ended from outside, and its output is what is left. */
#define NAMED_BETWEEN(name, begin, end)                                                            \
	BETWEEN_TEST(name, fprintf(stderr, "%s\n", #name); begin, end)
#define NAMED_TEST(name) NAMED_BETWEEN(name, , )
/* A device in that mode serves, its standby waits or may be getting ready; it ends as it should. */
#define SERVING_TEST(name, mode) NAMED_BETWEEN(name, start_serving(mode), stop())
#define STANDBY_TEST(name, mode) NAMED_BETWEEN(name, start_with_standby(mode), stop())

#endif
