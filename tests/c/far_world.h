/* SPDX-License-Identifier: Apache-2.0 */
/* A device with a front end far, and what its clients do: for tests of that front end. */
#ifndef ISW_TEST_FAR_WORLD_H
#define ISW_TEST_FAR_WORLD_H

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

#include "far_device.h"

#include "far_client.h"

#define FAR_BLOCKS 12u
#define FAR_BYTES  (FAR_BLOCKS * (uint64_t)ISWF_BLOCK_BYTES)
#define WRITER     ISWF_READ_SLOTS /* the first slot of writes */
#define SECRET     0xfeedface12345678ull

struct world {
	struct far_donor donor;
	isw_engine *engine;
	isw_frontend *frontend;
	int table, job;
};

static inline void begin(struct world *w)
{
	struct isw_engine_config config = far_engine_config(FAR_BYTES, -1, -1);
	struct isw_error error = {0};
	int pair[2];

	make_far_donor(&w->donor, FAR_BYTES);
	CHECK_OK(isw_engine_create(&config, NULL, &w->engine, &error), error);
	use_far_donor(w->engine, &w->donor, false);
	w->table = memfd_create("table", MFD_CLOEXEC);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	w->frontend = start_far(w->engine, w->table, pair[0]);
	close(pair[0]);
	w->job = pair[1];
}

static inline void finish(struct world *w)
{
	isw_frontend_destroy(w->frontend);
	isw_engine_destroy(w->engine);
	isw_store_destroy(w->donor.store);
	close(w->table);
	close(w->job);
}

static inline uint64_t used(const struct world *w)
{
	struct isw_frontend_info info;

	isw_frontend_info(w->frontend, &info);
	return info.used_bytes / ISWF_BLOCK_BYTES;
}

static inline void wait_used(const struct world *w, uint64_t blocks)
{
	for (uint32_t i = 0; used(w) != blocks; i++) {
		CHECK(i < 20000);
		pause_ms(1);
	}
}

static inline void fill(struct far_tester *t, uint32_t slot, uint64_t value)
{
	char *bytes = iswf_bytes(t->ring, slot);

	for (uint32_t i = 0; i < ISWF_BLOCK_BYTES; i += 8)
		memcpy(bytes + i, &value, 8);
}

static inline uint64_t word_of(struct far_tester *t, uint32_t slot, uint32_t page)
{
	uint64_t value;

	memcpy(&value, iswf_bytes(t->ring, slot) + (size_t)page * ISWF_PAGE_BYTES, 8);
	return value;
}

/* A child that connects, does something, and is killed; its exit code, or 0. */
static inline void in_child(struct world *w, void (*run)(struct far_tester *t))
{
	int status;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0) {
		struct far_tester t = connect_far(w->job);

		run(&t);
		kill(getpid(), SIGKILL);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status));
}

/* The next job's end, of a device that serves others already. */
static inline int add_job(const struct world *w)
{
	struct isw_error error = {0};
	int pair[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	CHECK_OK(isw_frontend_serve(w->frontend, pair[0], &error), error);
	close(pair[0]);
	return pair[1];
}

/* The front end ends as its process would; its engine stays what it was. */
static inline void succeed(struct world *w)
{
	int pair[2];

	isw_frontend_destroy(w->frontend);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	w->frontend = start_far(w->engine, w->table, pair[0]);
	close(pair[0]);
	close(w->job);
	w->job = pair[1];
}

/* Descriptors of this process, or lines of that beginning in what Linux says of each of them. */
static inline uint32_t count_descriptors(const char *line)
{
	DIR *directory = opendir("/proc/self/fdinfo");
	uint32_t count = 0;
	struct dirent *entry;

	CHECK(directory != NULL);
	while ((entry = readdir(directory)) != NULL) {
		char path[300], text[256];
		FILE *info;

		if (entry->d_name[0] == '.')
			continue;
		count += line == NULL;
		snprintf(path, sizeof(path), "/proc/self/fdinfo/%s", entry->d_name);
		info = line == NULL ? NULL : fopen(path, "re");
		while (info != NULL && fgets(text, sizeof(text), info) != NULL)
			count += strncmp(text, line, strlen(line)) == 0;
		if (info != NULL)
			fclose(info);
	}
	closedir(directory);
	return count;
}

static inline void wait_descriptors(const char *line, uint32_t count)
{
	for (uint32_t i = 0; count_descriptors(line) != count; i++) {
		CHECK(i < 20000);
		pause_ms(1);
	}
}

static inline uint32_t connections(const struct world *w)
{
	struct isw_frontend_info info;

	isw_frontend_info(w->frontend, &info);
	return info.connections;
}

#endif
