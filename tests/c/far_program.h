/* SPDX-License-Identifier: Apache-2.0 */
/* A program that is run with the agent preloaded, as a job is. */
#ifndef FAR_PROGRAM_H
#define FAR_PROGRAM_H

#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

extern char **environ;

#define JOB_FD  600
#define UFFD_FD 601

struct job {
	pid_t pid;
	int says; /* its standard output */
};

#define VARIABLES_MAX 1000u

/* Ours first: of two variables of one name programs see the first. */
static inline void add_environment(char *env[], size_t count)
{
	for (size_t i = 0; environ[i] != NULL && count < VARIABLES_MAX; i++)
		env[count++] = environ[i];
	env[count] = NULL;
}

/* The program believes that it is in that cgroup. job_end: of the job's socket pair. */
static inline struct job start_program(const char *path, char *argv[], const char *cgroup,
				       int job_end)
{
	int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC), out[2];
	char wish[256], preload[4096], *env[VARIABLES_MAX + 1] = {wish, preload};
	posix_spawn_file_actions_t actions;
	struct job job;

	snprintf(wish, sizeof(wish), "INFINISWAP_FAR=%d:%d:%s", JOB_FD, device < 0 ? -1 : UFFD_FD,
		 cgroup);
	snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", ISW_FAR_AGENT);
	CHECK_EQ(pipe2(out, O_CLOEXEC), 0);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, job_end, JOB_FD);
	if (device >= 0)
		posix_spawn_file_actions_adddup2(&actions, device, UFFD_FD);
	posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
	add_environment(env, 2);
	CHECK_EQ(posix_spawnp(&job.pid, path, &actions, NULL, argv, env), 0);
	posix_spawn_file_actions_destroy(&actions);
	close(out[1]);
	if (device >= 0)
		close(device);
	job.says = out[0];
	return job;
}

static inline int end_of(const struct job *job)
{
	int status;

	CHECK_EQ(waitpid(job->pid, &status, 0), job->pid);
	close(job->says);
	return status;
}

static inline void wait_for_word(const struct job *job)
{
	char word[16];

	CHECK(read(job->says, word, sizeof(word)) > 0);
}

#endif
